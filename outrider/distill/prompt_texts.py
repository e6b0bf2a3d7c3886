# ruff: noqa: E501
"""Texts to be summarized, rewritten, copied and asked about. Gaps such as [name] are filled at random."""

from __future__ import annotations

NAMES: tuple[str, ...] = (
    "Anna", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hiro", "Ines", "Jamal", "Kofi", "Lena", "Marco", "Nadia",
    "Oscar", "Priya", "Quentin", "Rosa", "Samuel", "Tara", "Uma", "Victor", "Wei", "Yara", "Zoe", "Amir", "Bianca", "Chen",
    "Daniela", "Erik", "Fatima", "George", "Hannah", "Ivan", "Julia", "Karim", "Lucia", "Mateo", "Nina", "Omar", "Paula",
    "Ravi", "Sofia", "Tom", "Vera", "William", "Ximena", "Yusuf", "Mrs. Parker", "Mr. Olsen", "Dr. Kim", "Aunt Mary",
)  # fmt: skip

GAPS: dict[str, tuple[object, ...]] = {
    "name": NAMES,
    "city": (
        "Lisbon", "Oslo", "Nairobi", "Lima", "Osaka", "Toronto", "Leeds", "Austin", "Prague", "Porto", "Dublin", "Hanoi",
        "Denver", "Turin", "Bergen", "Quito", "Accra", "Perth", "Riga", "Seville", "Boston", "Kyoto", "Ghent", "Zagreb",
    ),
    "number": (*range(2, 40), 45, 50, 60, 75, 80, 90, 120, 150, 200, 250, 400, 600, 1200),
    "percent": (*range(2, 60, 3), 64, 70, 75, 80, 85, 90, 95),
    "year": tuple(range(1890, 2025, 3)),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "month": (
        "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
        "December",
    ),
    "time": ("7:30 a.m.", "8 a.m.", "9:15 a.m.", "10 a.m.", "noon", "1:45 p.m.", "3 p.m.", "4:30 p.m.", "6 p.m.", "8 p.m."),
    "product": (
        "coffee machine", "desk lamp", "backpack", "bicycle", "water bottle", "headphones", "keyboard", "raincoat", "tent",
        "toaster", "office chair", "garden hose", "notebook", "camera", "blender", "suitcase", "phone case", "clock",
    ),
    "food": (
        "lentil soup", "apple pie", "fried rice", "tomato salad", "mushroom pasta", "fish tacos", "pancakes", "bean stew",
        "vegetable curry", "banana bread", "potato gratin", "dumplings", "an omelette", "rye bread", "a fruit tart",
    ),
    "animal": ("dog", "cat", "parrot", "rabbit", "horse", "goat", "tortoise", "hedgehog", "donkey", "duck", "owl", "ferret"),
    "job": (
        "nurse", "carpenter", "teacher", "baker", "engineer", "gardener", "pilot", "librarian", "chef", "lawyer", "farmer",
        "painter", "programmer", "photographer", "plumber", "translator", "firefighter", "musician", "mechanic", "tailor",
    ),
    "mood": ("happy", "tired", "nervous", "proud", "angry", "calm", "curious", "disappointed", "relieved", "surprised"),
    "weather": ("sunny", "rainy", "windy", "foggy", "snowy", "cloudy", "stormy", "hot", "cold", "mild"),
    "place": (
        "library", "market", "station", "park", "museum", "school", "harbor", "theater", "bakery", "hospital", "bridge",
        "stadium", "town hall", "swimming pool", "post office", "airport", "cinema", "university", "zoo", "church",
    ),
    "subject": (
        "algebra", "biology", "French", "geography", "history", "chemistry", "music", "physics", "art", "economics",
    ),
    "thing": (
        "umbrella", "letter", "key", "photograph", "map", "watch", "ring", "violin", "book", "lantern", "coin", "scarf",
        "box", "candle", "mirror", "whistle", "compass", "ticket", "bell", "basket",
    ),
    "department": ("sales", "marketing", "support", "finance", "design", "engineering", "legal", "shipping", "training"),
    "color": ("red", "blue", "green", "yellow", "black", "white", "orange", "purple", "brown", "gray", "silver"),
    "sport": ("football", "basketball", "tennis", "swimming", "hockey", "volleyball", "rowing", "cycling", "handball"),
    "plant": ("tomatoes", "roses", "tulips", "beans", "basil", "sunflowers", "carrots", "lavender", "peas", "mint"),
}  # fmt: skip
"""What a gap may become."""

TEXTS: tuple[str, ...] = (
    # built of gaps
    "The team met on [day] at [time] to discuss the new [product]. [name] reported that sales in [city] rose by [percent] "
    "percent. [name] asked for [number] more samples, and [name] will prepare a budget by [day]. The next meeting is in "
    "[month].",
    "Dear [name], I ordered a [product] on [day], and it has still not arrived. The tracking page has not changed for "
    "[number] days. Please tell me when I can expect it, or refund my money. Best regards, [name]",
    "[name] moved to [city] in [year] to work as a [job]. The first months were hard: the weather was [weather], and "
    "nobody knew her name. Then she joined a [sport] club, where she met [name]. They have been friends ever since.",
    "The [place] in [city] will be closed from [month] to [month] while the roof is repaired. The work costs about "
    "[number] million euros and was planned in [year]. Visitors can use the [place] next to it in the meantime.",
    "Today will be [weather] in [city], with temperatures around [number] degrees. On [day] the wind turns and it becomes "
    "[weather]. The weekend looks [weather]. Drivers should take care on bridges in the early morning.",
    "I bought this [product] [number] months ago and use it every day. It is light, [color] and easy to clean. The only "
    "problem is the lid, which does not close well. For the price of [number] dollars I would buy it again.",
    "[name] found an old [thing] under the floor of the [place]. It was wrapped in [color] paper and carried the date "
    "[year]. Nobody in the family had ever seen it before. [name] thinks it belonged to a [job] who lived there.",
    "To make [food] for [number] people, wash and cut the vegetables first. Heat some oil in a large pan and add onions. "
    "After [number] minutes add the rest, stir well, and let it cook on low heat. Serve it warm with bread.",
    "Our class visited the [place] on [day]. We saw a [animal] and learned how a [job] works. [name] asked the most "
    "questions. At [time] we had lunch in the park, and then it got [weather], so we took the bus home.",
    "Subject: [subject] exam. The exam takes place on [day] at [time] in the main hall. Bring a pen, a ruler and your "
    "student card. You have [number] minutes. Phones must be switched off. Results will be sent in [month].",
    "In a survey of [number] people in [city], [percent] percent said that they cycle to work. In [year] it was only "
    "[percent] percent. The mayor, [name], wants to build [number] kilometers of new paths by the end of the year.",
    "The [department] department has a new manager. [name] comes from [city], where she worked as a [job] for [number] "
    "years. She starts on [day]. [name], who led the department until now, moves to [department].",
    "[name]'s [animal] ran away on a [weather] evening in [month]. The whole street helped to look for it. At [time] a "
    "[job] heard a noise behind the [place], and there it was, [mood] but unharmed.",
    "At [time] the alarm went off in the server room. [name] restarted the database, but the error came back after "
    "[number] minutes. The cause was a full disk: log files had grown by [percent] percent since [day]. They are now "
    "deleted every night.",
    "[city] won the [sport] final on [day] with [number] to [number]. [name] scored in the last minute. The coach said he "
    "was [mood] with the team. About [number] thousand people watched the game in the stadium.",
    "Plant [plant] in [month], when the soil is warm. Leave [number] centimeters between the plants. Water them in the "
    "evening, but not when it is [weather]. After about [number] weeks you can harvest for the first time.",
    "Hi [name], are we still meeting at the [place] on [day]? I can be there at [time]. I'll bring the [thing] you asked "
    "for. If it is [weather], let's go to the [place] instead. See you, [name]",
    "The company sold [number] thousand units in [year], up [percent] percent. Costs fell in [department] but rose in "
    "[department]. [name], the chief executive, expects a [mood] year and plans to open an office in [city].",
    "Once a [job] and a [animal] lived in a [color] house near the [place]. Every [day] they walked to the market to sell "
    "[plant]. One [weather] morning they found a [thing] on the road, and everything changed.",
    "Room [number] is for quiet work only. Please do not eat [food] there, and put your [thing] on the shelf. Bookings are "
    "made with [name] until [time]. The room is closed on [day] afternoons for cleaning.",
    "The trip from [city] to [city] takes [number] hours by train. Trains leave at [time] and at [time]. A ticket costs "
    "[number] euros, or [percent] percent less if you book before [month]. Bicycles need a ticket of their own.",
    "I felt [mood] when I got the letter. After [number] years as a [job], I was to move to [city] and lead a team of "
    "[number]. [name] said I should take the chance. I answered on [day], before I could change my mind.",
    "Patient notes: [name], age [number], came on [day] with a sore throat and a mild fever. No allergies. Advised rest, "
    "warm drinks and a follow-up in [number] days if it does not get better.",
    "Release notes: the search is now [percent] percent faster. The export button moved to the [color] bar. A bug that "
    "lost the last line of a table is fixed. Thanks to [name] and [name] for reporting it.",
    "For sale: a [color] [product], [number] years old, in good condition. It comes with a [thing]. The price is [number] "
    "dollars. Pick it up in [city] on [day] after [time]. Call [name].",
    "[name] has taught [subject] in [city] since [year]. Her lessons begin with a story and end with a question. Last "
    "year, [percent] percent of her students passed. 'They only need time,' she says, 'and someone who listens.'",
    # whole
    "The honey bee visits up to five thousand flowers in a day. In the hive it tells others where it has been by a dance: "
    "the angle shows the direction, the length shows the distance. Farmers depend on this work, since many fruits and "
    "nuts would not grow without it.",
    "A good password is long rather than complicated. Four words that have nothing to do with each other are easier to "
    "remember than a row of symbols, and harder to guess. Use a different one for each account, and let a manager keep "
    "them.",
    "When the ice on the lake began to sing, the old fisherman packed his tools. He had heard the sound three times in "
    "his life. The first time he had laughed at it; the second time he had run; this time he walked, slowly, and did not "
    "look back until he stood on the shore.",
    "Bread needs only flour, water, salt and time. The dough rises because yeast turns sugar into gas, which the gluten "
    "holds in small bubbles. If it rises too quickly, it tastes of little. A night in the refrigerator gives it flavor.",
    "City trees do more than look nice. They cool streets by several degrees, keep rain out of the drains, and give birds "
    "a place to nest. But they need room: most die young because their roots find only stone and pipes.",
    "The museum is free on the first Sunday of the month. Large bags must be left at the entrance. Photographs are "
    "allowed without flash. The café on the second floor closes half an hour before the museum does.",
    "Our ancestors slept in two parts. They went to bed at dusk, woke around midnight for an hour or two, talked, prayed or "
    "read, and then slept until morning. Only with gas light and factories did one long sleep become the rule.",
    "Glass is made of sand, soda and lime, melted at about 1,500 degrees. While it cools it never quite becomes a crystal; "
    "its atoms stay in disorder, like those of a liquid that has stopped moving. That is why light passes through it.",
    "To whom it may concern: I have known the applicant for six years, first as a student and later as a colleague. She is "
    "reliable, quick to learn and kind to others. I recommend her without reservation for the position.",
    "The plan was simple. One of them would distract the guard, one would open the gate, and the third would bring the "
    "horses. Nobody had asked what the horses thought of it, and that was the first mistake.",
    "Inflation means that prices rise in general, so that money buys less. A little of it does no harm and makes people "
    "spend rather than wait. Too much of it hurts those who have savings or a fixed income. Central banks raise interest "
    "rates to slow it down.",
    "Learning an instrument changes the brain. After a year of practice, the areas for hearing and for moving the fingers "
    "are connected more strongly. It does not make children better at mathematics, as is often claimed, but it teaches "
    "them patience.",
    "The desert is not empty. At night foxes, mice and snakes come out of their holes. Some plants wait for years as seeds "
    "and bloom within days when rain falls. People who live there read the ground as others read a newspaper.",
    "We apologize for the interruption of our service last night. A cable was damaged during construction work. All "
    "systems are running again, and no data was lost. Customers will receive a credit for the hours that they missed.",
    "A map is always a choice. It leaves out almost everything so that something can be seen: roads for drivers, heights "
    "for hikers, borders for politicians. Whoever draws it decides what matters.",
    "She opened the window and listened. Somewhere a radio was playing, a door closed, a child laughed. It was the same "
    "street as ever, and yet it seemed to hold its breath, as streets do before a storm or a piece of news.",
    "Chess computers have beaten the best humans since the 1990s, but the game has not died. More people play it than ever "
    "before. They use computers to learn, and watch masters who make mistakes, because mistakes make a good story.",
    "Wash your hands with soap for at least twenty seconds. Soap does not kill most germs, but it lifts them off the skin "
    "so that water can carry them away. Dry your hands well, since damp skin passes germs on more easily.",
    "The bridge was built twice. The first one fell after four months because the wind made it swing like a rope. The "
    "second has openings in its sides that let the wind through. It has stood for seventy years.",
    "Working from home saves time, but the day has no edges. It helps to start with a walk, to have a desk that is used "
    "for nothing else, and to shut the computer at a fixed hour. Meetings should be few and short.",
    "Volunteers count birds in their gardens for one hour every January. The numbers are rough, but there are many of "
    "them, and over the years they show which birds become rare. Last winter sparrows came first, and tits second.",
    "Coffee came to Europe in the seventeenth century. At first it was sold as a medicine. Soon coffee houses were places "
    "where merchants made deals, writers argued and newspapers were read aloud. One of them became a stock exchange.",
    "The rules of the garden are few. Water in the morning or in the evening. Close the gate. Take only what you have "
    "planted. If you borrow a tool, bring it back clean. If you do not know what a plant is, ask before you pull it out.",
    "Sound needs something to travel through: air, water, steel. In space there is nothing, so even an exploding star is "
    "silent. What films let us hear is put in later, because a silent explosion would seem wrong to us.",
)
"""Each is one text, or with gaps the build of many."""
