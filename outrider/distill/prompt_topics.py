# ruff: noqa: E501
"""What prompts are about."""

from __future__ import annotations

_BY_FIELD = {
    "nature": """
        how bees make honey; ocean tides; why leaves change color in autumn; coral reefs; the water cycle; earthquakes;
        volcanoes; how birds navigate; hibernation; rainforests; desert plants; the northern lights; mushrooms; spider
        webs; whales; wolves; octopus intelligence; butterflies; photosynthesis; seeds and germination; glaciers; rivers
        and erosion; thunderstorms; tornadoes; rainbows; fog; soil; earthworms; owls; penguins; elephants; sharks;
        fireflies; tree rings; bamboo; wetlands; invasive species; pollination; camouflage in animals; bats; seasons;
        snowflakes; caves; crows; sea turtles; salmon migration; ants; moss; the smell of rain; tide pools""",
    "science": """
        gravity; black holes; the speed of light; atoms; magnets; static electricity; DNA; vaccines; antibiotics; the
        immune system; how the heart works; sleep and the brain; memory; the periodic table; acids and bases; friction;
        sound waves; lenses and mirrors; nuclear fusion; radioactivity; evolution; cells; bacteria; viruses; proteins;
        the ozone layer; plate tectonics; fossils; dinosaurs; the solar system; Mars; the Moon; comets; stars; galaxies;
        telescopes; microscopes; thermometers; the scientific method; probability; prime numbers; fractions; the
        Pythagorean theorem; statistics; negative numbers; infinity; symmetry; why the sky is blue; boiling water at
        high altitude; the placebo effect; color blindness; superconductors; entropy; the greenhouse effect""",
    "technology": """
        how Wi-Fi works; GPS; solar panels; batteries; electric cars; microwave ovens; touchscreens; search engines;
        encryption; passwords; cloud storage; email spam; open source software; version control; databases; the
        internet of things; robots; drones; 3D printing; barcodes; digital cameras; noise-cancelling headphones;
        compilers; operating systems; computer memory; web browsers; cookies on websites; two-factor authentication;
        machine learning; chatbots; recommendation systems; video games; virtual reality; smart watches; satellites;
        fiber optics; bridges; skyscrapers; refrigerators; bicycles; steam engines; windmills; jet engines; elevators;
        printers; QR codes; backups; APIs; unit tests; debugging; spreadsheets; algorithms; recursion; caching""",
    "history": """
        the printing press; ancient Egypt; the Roman Empire; the Silk Road; the Renaissance; the Industrial Revolution;
        the invention of writing; the history of chess; castles; Vikings; samurai; the Great Wall of China; the space
        race; the history of coffee; the first computers; railways; the Black Death; ancient Greece; democracy; the
        French Revolution; the Ottoman Empire; the Inca; pirates; explorers; calendars; the history of bread; lighthouses;
        the telegraph; museums; the Olympic Games; paper money; maps; the library of Alexandria; the suffrage movement;
        trade in the Middle Ages; clocks; the history of medicine; photography; the bicycle boom; public schools""",
    "daily life": """
        morning routines; keeping a diary; moving to a new city; making friends as an adult; saving money; budgeting;
        grocery shopping; cooking for one; baking bread; brewing tea; making pizza; breakfast ideas; packing for a trip;
        cleaning the kitchen; doing laundry; house plants; gardening on a balcony; compost; recycling; adopting a dog;
        training a puppy; living with a cat; commuting by bike; public transport; learning to drive; job interviews;
        writing a resume; working from home; meetings; email etiquette; procrastination; time management; note taking;
        study habits; reading more books; public speaking; small talk; saying no; apologizing; giving feedback;
        neighbors; birthday parties; weddings; gifts; board games; picnics; camping; hiking; swimming; running a first
        marathon; yoga; stretching; sleep hygiene; drinking water; eating vegetables; headaches; sunscreen; first aid;
        colds; dentists; glasses; walking; rainy days; Sunday afternoons; power cuts; lost keys; fixing a leaky tap;
        painting a room; choosing a mattress; second-hand shops; renting a flat; insurance; taxes; retirement savings""",
    "arts": """
        jazz; the violin; learning the guitar; choirs; drums; hip hop; opera; folk songs; film music; oil painting;
        watercolors; sculpture; origami; pottery; knitting; street art; comics; animation; documentaries; theater;
        ballet; poetry; haiku; fairy tales; detective novels; science fiction; fantasy maps; libraries; writing a first
        novel; character development; metaphors; humor; stand-up comedy; photography at night; fonts; architecture;
        interior design; fashion; perfumes; tattoos; puppets; circus; museums for children; rhyme; movie endings""",
    "society": """
        voting; free speech; privacy; homework; school uniforms; universities; teachers; volunteering; charity; climate
        policy; public parks; city planning; housing costs; tourism; migration; languages dying out; learning Spanish;
        learning Japanese; sign language; translation; newspapers; advertising; social media; fake news; celebrities;
        sports fans; football; basketball; tennis; cricket; chess tournaments; e-sports; the Olympics; minimum wage;
        inflation; stock markets; small businesses; startups; franchises; unions; remote teams; leadership; teamwork;
        customer service; negotiation; product design; marketing a bakery; supply chains; farming; fishing; fair trade;
        fast food; vegetarian diets; school lunches; traffic jams; speed limits; bicycles in cities; noise; tipping""",
    "imagined": """
        a lighthouse keeper who collects clouds; a robot that learns to paint; a village on the back of a turtle; a lost
        letter; a dragon who is afraid of fire; a train that never stops; a girl who talks to the wind; an old map in an
        attic; a clock that runs backwards; two rival bakers; a fox and a snail; the last library on Earth; a city under
        the sea; a knight without a sword; a talking suitcase; a ghost who lost its house; a detective cat; a time
        traveler's grocery list; a mountain that moves at night; a boy who finds a star; a bridge between two worlds; a
        violin that plays alone; a garden on the Moon; a shy giant; the day the internet stopped; a spaceship full of
        books; a king who wanted to be a farmer; an invisible friend; a storm in a bottle; a school for wizards; a
        forgotten birthday; the secret of the old oak; a submarine crew; a stray dog in Paris; a baker in wartime; the
        first colony on Mars; a mirror that tells lies; a rainy night in Tokyo; a message from the future; three wishes;
        a retired superhero; a haunted elevator; a chess game with Death; the sound of snow; a magic pencil""",
    "places": """
        Paris; Tokyo; Cairo; the Amazon; Iceland; New Zealand; Kenya; Brazil; India; Mexico City; Venice; the Sahara;
        the Alps; Antarctica; Istanbul; Vietnam; Canada; Morocco; Peru; Scotland; Norway; the Mediterranean Sea; Hawaii;
        Berlin; Seoul; Buenos Aires; the Grand Canyon; Mount Everest; the Nile; the Pacific Ocean; Greece; Portugal;
        Singapore; Madagascar; Siberia; the Netherlands; Cuba; Ethiopia; Mongolia; Lisbon; Chicago; a small island""",
    "ideas": """
        happiness; courage; honesty; friendship; patience; boredom; curiosity; failure; ambition; forgiveness;
        loneliness; kindness; creativity; luck; justice; beauty; common sense; habits; motivation; empathy; trust;
        gratitude; growing old; childhood; home; silence; dreams; mistakes; rules; freedom; responsibility; wisdom;
        the meaning of work; money and happiness; nostalgia; competition; perfectionism; critical thinking; free will;
        stoicism; minimalism; the trolley problem; optimism; fear of the dark; first impressions; white lies""",
}  # fmt: skip

TOPICS: tuple[str, ...] = tuple(
    " ".join(topic.split()) for topics in _BY_FIELD.values() for topic in topics.split(";") if topic.strip()
)
