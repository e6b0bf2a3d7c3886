# ruff: noqa: E501
"""How prompts ask: frames around a topic or a text, openings and manners that go with any, and turns of a chat."""

from __future__ import annotations

FRAMES: tuple[str, ...] = (
    # questions
    "What is {topic}?", "What should I know about {topic}?", "Why does {topic} matter?", "Can you tell me about {topic}?",
    "What are common misconceptions about {topic}?", "What is the most interesting fact about {topic}?",
    "How has {topic} changed over the years?", "Who should care about {topic}, and why?",
    "What would the world be like without {topic}?", "What questions do experts ask about {topic}?",
    "Is {topic} overrated?", "What do most people get wrong about {topic}?", "What can children learn from {topic}?",
    "How would you describe {topic} to someone who has never heard of it?", "What makes {topic} difficult?",
    "When did people first start thinking about {topic}?", "What are the risks of {topic}?",
    "What is the connection between {topic} and {other}?", "Where can I learn more about {topic}?",
    "What is a good first step into {topic}?", "Which words do people use when they talk about {topic}?",
    # explanations
    "Explain {topic}.", "Explain {topic} to a ten-year-old.", "Explain {topic} with an analogy.",
    "Explain step by step how {topic} works or happens.", "Give a short introduction to {topic}.",
    "Describe {topic} in your own words.", "Write an encyclopedia entry about {topic}.",
    "Teach me the basics of {topic} as if I were your student.", "Give me a two-minute talk on {topic}.",
    "Write a paragraph about {topic}.", "Write three paragraphs about {topic}: past, present and future.",
    "Break {topic} down into its most important parts.", "Define {topic} and give two examples.",
    "Explain why some people love {topic} and others do not.", "Summarize what is known about {topic}.",
    # stories and poems
    "Write a short story about {topic}.", "Tell me a bedtime story about {topic}.",
    "Write the opening of a novel about {topic}.", "Write a story about {topic} that ends with a surprise.",
    "Write a dialogue between two friends about {topic}.", "Write a scene in a play about {topic}.",
    "Write a poem about {topic}.", "Write a haiku about {topic}.", "Write a limerick about {topic}.",
    "Write a funny story about {name} and {topic}.", "Write a diary entry by {name} about {topic}.",
    "Write a fable about {topic} with a moral.", "Write a song verse about {topic}.",
    "Continue this story: {name} had never thought much about {topic} until that morning.",
    "Describe a picture that shows {topic}.", "Write a mystery in five sentences about {topic}.",
    "Write a story in which {topic} meets {other}.",
    # lists
    "List five facts about {topic}.", "List ten ideas related to {topic}.", "Give me three tips on {topic}.",
    "List the pros and cons of {topic}.", "What are the top five reasons to be interested in {topic}?",
    "Make a list of questions for a quiz on {topic}.", "Name seven things that remind you of {topic}.",
    "Give me a checklist for {topic}.", "List the steps for getting started with {topic}.",
    "Make a table with three columns about {topic}.", "Give me five book titles, invented, about {topic}.",
    "List ten words associated with {topic} and explain each in a few words.", "Create a glossary for {topic}.",
    "Suggest four activities for a class about {topic}.", "Rank three aspects of {topic} by importance.",
    "Give me five headlines about {topic}.", "List similarities and differences between {topic} and {other}.",
    # letters and messages
    "Write an email to {name} about {topic}.", "Write a polite email asking a colleague for information on {topic}.",
    "Write a letter to a friend about {topic}.", "Write a short text message about {topic}.",
    "Write an invitation to an event about {topic}.", "Write a complaint that has to do with {topic}.",
    "Write a thank-you note to {name} that mentions {topic}.", "Write a social media post about {topic}.",
    "Write a product description inspired by {topic}.", "Write a press release about {topic}.",
    "Draft a reply to {name}, who asked about {topic}.", "Write an apology email about a mix-up over {topic}.",
    "Write an announcement for the whole company about {topic}.", "Write a newsletter section on {topic}.",
    # advice and plans
    "Give me advice on {topic}.", "How can I get better at {topic}?", "Make a one-week plan for {topic}.",
    "I am worried about {topic}. What should I do?", "What would you say to someone who is confused by {topic}?",
    "Plan a lesson of 45 minutes about {topic}.", "Plan a weekend around {topic}.",
    "How do I talk to my parents about {topic}?", "What mistakes should beginners avoid with {topic}?",
    "Write a motivational speech about {topic}.", "Help me choose between {topic} and {other}.",
    "Suggest a project about {topic} for a student.", "Design a small experiment about {topic}.",
    "What would a day spent on {topic} look like?", "How do I explain {topic} to my boss?",
    # arguments and comparison
    "Argue in favor of {topic}.", "Argue against {topic}.", "Write a balanced essay about {topic}.",
    "Compare {topic} with {other}.", "What would a critic say about {topic}?",
    "Write a debate between {name} and a skeptic about {topic}.", "Write an opinion piece on {topic}.",
    "Discuss the ethics of {topic}.", "Write an introduction and a conclusion for an essay on {topic}.",
    "What is the strongest argument people make about {topic}, and what is the best answer to it?",
    "Write a review of a museum exhibition on {topic}.", "Give three predictions about {topic}.",
    # roles and forms
    "You are a tour guide. Tell visitors about {topic}.", "You are a news reporter. Report on {topic}.",
    "You are a scientist. Describe your work on {topic}.", "You are a grandparent. Share a memory about {topic}.",
    "Interview {name}, an expert on {topic}: write three questions and answers.",
    "Write a quiz question about {topic} with four options and the right answer.",
    "Write a riddle whose answer is {topic}.", "Write a joke about {topic}.", "Write a slogan for {topic}.",
    "Write a recipe inspired by {topic}.", "Write a trailer for a film about {topic}.",
    "Write a timeline about {topic}.", "Write frequently asked questions about {topic} and answer them.",
    "Write the minutes of a meeting about {topic}.", "Write instructions for {topic}.",
    "Write a JSON object with five fields that describes {topic}.", "Write a short abstract of a paper on {topic}.",
    "Turn {topic} into a lesson about life.", "Write a tweet-length summary of {topic}.",
    "Use {topic} in three different sentences.", "Complete the sentence: {topic} is like",
    "Translate the phrase '{topic}' into French, Spanish and German.", "Spell out an acronym that fits {topic}.",
)  # fmt: skip

MANNERS: tuple[str, ...] = (
    "Keep it short.", "Answer in one sentence.", "Answer in two or three sentences.", "Use simple words.",
    "Use bullet points.", "Number each point.", "Be concise.", "Go into detail.", "Write about 100 words.",
    "Write for beginners.", "Write for experts.", "Use a friendly tone.", "Use a formal tone.", "Make it funny.",
    "Give an example.", "Start with a question.", "End with a question.", "Avoid technical terms.",
    "Use short sentences.", "Think step by step.", "Add a title.", "Write it in the first person.",
    "Do not use lists.", "Use headings.", "Mention one surprising detail.", "Write in the present tense.",
    "Write as if for a newspaper.", "Include a quotation.", "Keep each point under ten words.", "Be honest.",
)  # fmt: skip

OPENINGS: tuple[str, ...] = (
    "Hi! ", "Hello. ", "Please help me. ", "Quick question: ", "For my homework: ", "I'm writing a blog. ",
    "I have a presentation tomorrow. ", "My daughter asked me this: ", "Hey there, ", "I'm curious. ",
    "Thanks in advance. ", "I'm preparing a class. ", "Just for fun: ", "I need this for work. ", "Dear assistant, ",
    "I am not an expert. ", "Let's try something. ", "Imagine you are a teacher. ", "Good morning! ", "One more thing: ",
)  # fmt: skip

TEXT_FRAMES: tuple[str, ...] = (
    "Summarize the following text in one sentence.\n\n{text}", "Summarize this:\n\n{text}",
    "{text}\n\nWhat is the main point of the text above?", "Give the text below a title.\n\n{text}",
    "List the key points of this text.\n\n{text}", "Rewrite this text so that a child understands it.\n\n{text}",
    "Rewrite the following in a formal style.\n\n{text}", "Make this text shorter:\n\n{text}",
    "Repeat the following text word for word.\n\n{text}", "Copy this text, but write it in the past tense.\n\n{text}",
    "Copy the text and put each sentence on its own line.\n\n{text}", "Proofread this text and return it.\n\n{text}",
    "Correct any mistakes in the text and print the result.\n\n{text}", "Turn this text into bullet points.\n\n{text}",
    "Who and what is mentioned in this text? Make a list.\n\n{text}", "Write three questions about this text.\n\n{text}",
    "Answer with yes or no and a reason: is this text optimistic?\n\n{text}", "Continue this text.\n\n{text}",
    "Write a reply to this:\n\n{text}", "Turn this into a polite email:\n\n{text}",
    "Extract all numbers from the text.\n\n{text}", "Which sentence of the text is the most important? Quote it.\n\n{text}",
    "Explain the text to me:\n\n{text}", "Rewrite the text from another point of view.\n\n{text}",
    "Here is a text:\n\n{text}\n\nWrite a one-line summary and then the text again.", "Simplify:\n\n{text}",
    "Text: {text}\n\nQuestion: What happened?\nAnswer:", "Translate this text into Spanish.\n\n{text}",
    "Add a fitting last sentence to the text and return the whole.\n\n{text}", "Paraphrase this:\n\n{text}",
    "Convert the information in this text to JSON.\n\n{text}", "Make a table of what the text says.\n\n{text}",
    "Replace every name in this text with the word PERSON.\n\n{text}", "Is anything unclear in this text?\n\n{text}",
    "Write the text again with the sentences in a better order.\n\n{text}", "Write a headline for this:\n\n{text}",
    "TL;DR\n\n{text}", "Read this and tell me what to do next.\n\n{text}", "Quote the first sentence.\n\n{text}",
    "Expand this text with one more detail for each sentence.\n\n{text}", "Turn this text into a dialogue.\n\n{text}",
    "What could be the source of this text?\n\n{text}", "Make this text sound more exciting:\n\n{text}",
    "Format the following as Markdown with a heading and a list.\n\n{text}", "Pick five keywords.\n\n{text}",
    "Write the same text in the style of a fairy tale.\n\n{text}", "Compare the text with what you know.\n\n{text}",
    "Rewrite this text and change as little as possible, but use British spelling.\n\n{text}",
)  # fmt: skip

FOLLOW_UPS: tuple[str, ...] = (
    "Can you make it shorter?", "Can you give an example?", "Why?", "Explain that again in simpler words.",
    "Now write it as a list.", "What else should I know?", "Thanks! Can you add more detail?", "Are you sure?",
    "Rewrite your answer in a formal tone.", "Rewrite that, but funnier.", "What is the most important point?",
    "Summarize your answer in one sentence.", "Turn your answer into bullet points.", "How do you know that?",
    "What would an expert disagree with?", "Continue.", "Translate your answer into Spanish.", "Give me three more.",
    "Change the ending.", "Repeat the last part.", "Can you number the points?", "What does the second point mean?",
    "Write it again without the first sentence.", "Make it suitable for children.", "And what about the opposite?",
    "Ask me a question about it.", "That is not what I meant. Try again.", "Who would find this useful?",
    "Put that into a table.", "Great. Now write a title for it.",
)  # fmt: skip

SYSTEMS: tuple[str, ...] = (
    "You are a helpful assistant.", "You are a patient teacher.", "Answer briefly.", "You are a friendly chatbot.",
    "You are an expert programmer.", "You answer in plain English.", "You are a careful editor.",
    "You are an assistant for a public library.", "Be polite and precise.", "You are a creative writer.",
    "You help employees of a small company.", "You are a knowledgeable guide who likes examples.",
    "Answer as truthfully as you can.", "You are a customer support agent.", "You write clear, simple answers.",
)  # fmt: skip

SMALL_TALK: tuple[tuple[str, str], ...] = (
    ("Hi", "Hello! How can I help you today?"),
    ("Good morning!", "Good morning! What can I do for you?"),
    ("Who are you?", "I am an AI assistant. I can answer questions and help you write."),
    ("Can you help me with something?", "Of course. What do you need help with?"),
    ("I have a few questions.", "Go ahead, I'm happy to answer them."),
    ("How are you?", "I'm doing well, thank you for asking. How can I help?"),
    ("Thanks for your help yesterday.", "You're welcome! Is there anything else I can do?"),
    ("What can you do?", "I can explain things, write texts and code, and give ideas. Ask me anything."),
    ("Let's work on a text together.", "Sounds good. Tell me what it should be about."),
    ("I am bored.", "Let's change that! Would you like a story, a quiz or a fun fact?"),
    ("Do you speak English?", "Yes, I do. What would you like to talk about?"),
    ("I need ideas.", "I can help with that. What are the ideas for?"),
)  # fmt: skip
