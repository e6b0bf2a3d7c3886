# ruff: noqa: E501
"""Code to be written, and code to be changed."""

from __future__ import annotations

_GENERAL: tuple[str, ...] = (
    "reverses a string", "checks whether a word is a palindrome", "computes the factorial of a number",
    "returns the n-th Fibonacci number", "finds the largest number in a list", "counts the vowels in a text",
    "removes duplicates from a list and keeps the order", "sorts a list of numbers with bubble sort",
    "checks whether a number is prime", "merges two sorted lists", "counts how often each word occurs",
    "converts Celsius to Fahrenheit", "finds the greatest common divisor of two numbers",
    "performs a binary search", "flattens a nested list", "rotates a list by k places",
    "computes the mean and the median of a list", "validates an email address", "capitalizes each word of a sentence",
    "finds the longest word in a sentence", "transposes a matrix", "multiplies two matrices",
    "checks whether two strings are anagrams", "computes the sum of the digits of a number",
    "converts an integer to a Roman numeral", "generates all permutations of a list", "finds missing numbers in a range",
    "groups a list of objects by a key", "splits a list into chunks of size n", "parses a date such as 2024-05-01",
    "computes the distance between two points", "implements a stack with push and pop", "implements a queue",
    "implements a linked list with insert and delete", "inserts values into a binary search tree",
    "walks a tree in breadth-first order", "checks whether brackets are balanced", "computes a running total",
    "formats a number with thousands separators", "counts the lines of a text", "replaces tabs by spaces",
    "reads a CSV text and returns a list of rows", "computes compound interest", "rolls two dice and adds them",
    "shuffles a deck of cards", "picks a random element of a list", "retries a failing function three times",
    "measures how long a function takes", "memoizes a function", "converts a dictionary to a query string",
    "finds the second smallest number", "returns the intersection of two lists", "zips two lists into pairs",
    "encodes a text with a Caesar cipher", "compresses a string by counting repeated letters", "prints a multiplication table",
    "draws a triangle of stars", "simulates a bank account with deposit and withdraw", "keeps a to-do list",
    "finds all pairs of numbers with a given sum",
)  # fmt: skip
_PYTHON: tuple[str, ...] = (
    *_GENERAL, "reads a JSON file and returns its keys", "lists all files of a folder by size",
    "downloads a web page with the standard library", "opens a context manager that times a block",
    "defines a dataclass for a book with title, author and year", "parses command-line arguments with argparse",
    "writes log messages to a file", "walks a folder and counts lines of code", "computes word frequencies with Counter",
    "runs tasks in a thread pool", "fetches several URLs with asyncio", "yields lines of a file lazily with a generator",
)  # fmt: skip
_JAVASCRIPT: tuple[str, ...] = (
    *_GENERAL, "debounces a function", "fetches JSON from a URL and shows an error when it fails",
    "toggles a CSS class when a button is clicked", "sorts an array of objects by a property",
    "deep-copies an object", "stores a value in local storage", "renders a list of items as HTML",
    "waits for a number of milliseconds with a promise", "validates a form before it is sent",
)  # fmt: skip
_SQL: tuple[str, ...] = (
    "lists all customers from Berlin", "counts orders per customer", "finds the ten best-selling products",
    "returns employees who earn more than the average", "joins orders with customers and shows the total of each",
    "deletes sessions older than thirty days", "creates a table for books with author and year",
    "adds a column for the last login", "finds duplicate email addresses", "updates the price of all products by 5 percent",
    "returns the newest order of each customer", "counts sign-ups per month", "finds customers without orders",
    "ranks students by grade within their class", "creates an index on the date column", "sums revenue by country",
    "selects rows between two dates", "returns the second highest salary", "inserts three rows into a table of cities",
)  # fmt: skip
_SHELL: tuple[str, ...] = (
    "finds all files larger than 100 MB", "counts the lines of all Python files", "renames all .jpeg files to .jpg",
    "shows the ten largest folders", "replaces a word in all text files of a folder", "backs up a folder with the date in its name",
    "lists processes by memory use", "follows a log file and shows only errors", "downloads a file and checks its checksum",
    "deletes empty folders", "counts unique IP addresses in a log", "prints the second column of a CSV file",
    "waits until a port is open", "shows which branch of a git repository is current", "unpacks every archive in a folder",
    "sorts a file and removes duplicate lines", "prints the current date in ISO format", "copies only new files to a folder",
)  # fmt: skip
_MARKUP: tuple[str, ...] = (
    "shows a contact form with name, email and message", "has a table of three products with prices",
    "has a navigation bar with four links", "shows a card with an image, a title and a button",
    "lists five recipes as links", "centers a box on the page", "has two columns that stack on small screens",
    "shows a login page", "has a footer with an address", "uses a style sheet with a dark theme",
)  # fmt: skip

LANGUAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Python", _PYTHON), ("Python", _PYTHON), ("Python", _PYTHON), ("JavaScript", _JAVASCRIPT), ("JavaScript", _JAVASCRIPT),
    ("TypeScript", _JAVASCRIPT), ("SQL", _SQL), ("bash", _SHELL), ("Java", _GENERAL), ("C", _GENERAL), ("Go", _GENERAL),
    ("Rust", _GENERAL), ("HTML", _MARKUP),
)  # fmt: skip
"""A language and what may be asked for in it; a language listed twice is asked for twice as often."""

FRAMES: tuple[str, ...] = (
    "Write {language} code that {task}.", "Write a {language} example that {task}.", "In {language}, {task}: show the code.",
    "How do I write {language} code that {task}?", "Give me {language} code that {task}, with comments.",
    "Write {language} that {task}. Only show the code.", "Write {language} code that {task} and explain each line.",
    "I need a piece of {language} that {task}. Keep it short.", "Show two ways to write {language} code that {task}.",
    "Write {language} code that {task}, then give an example of how to use it.",
    "Write clean {language} code that {task}. Handle errors.", "Please write something in {language} that {task}.",
    "Write {language} code that {task}. Then write tests for it.", "Explain how to write {language} that {task}.",
    "Complete the following: a {language} program that {task}.", "Can you code this in {language}? It {task}.",
    "As an expert in {language}, write code that {task}.", "Write a tutorial: {language} code that {task}.",
    "{language}: {task}", "Write well documented {language} code that {task}.",
)  # fmt: skip

NEW_NAMES: tuple[str, ...] = (
    "value", "result", "item_count", "total", "entries", "node", "message", "user", "price", "index", "record", "data",
    "output", "first", "current", "size", "label", "width", "buffer", "score",
)  # fmt: skip

EDITS: tuple[str, ...] = (
    "Add a docstring or comment to this code and print all of it.\n\n{code}", "Explain what this code does.\n\n{code}",
    "Rename one variable of this code to `{new}` and return the complete code.\n\n{code}",
    "Add type annotations where the language has them. Return the whole code.\n\n{code}",
    "Find a bug or a weakness in this code.\n\n{code}", "Print this code unchanged.\n\n{code}",
    "Rewrite this code so that it handles empty input. Show the full code.\n\n{code}",
    "Add error handling to the following code.\n\n{code}", "Add a parameter named `{new}` to this code.\n\n{code}",
    "Refactor this code to be easier to read.\n\n{code}", "Write a test for this code.\n\n{code}",
    "Here is some code:\n\n{code}\n\nReturn it with a comment above each line.", "Make this code faster.\n\n{code}",
    "Change the code so that it prints `{new}` at the end. Output all the code.\n\n{code}",
    "What does this print or return, and why?\n\n{code}", "Convert this code to Python.\n\n{code}",
    "Review this code as a colleague would.\n\n{code}", "Simplify:\n\n{code}", "Complete this code:\n\n{code}",
    "Fix the formatting of this code and return it.\n\n{code}", "Add logging to this code, keep everything else.\n\n{code}",
    "Replace every number in this code by a named constant.\n\n{code}", "{code}\n\nWhat is the time complexity?",
    "Write the same code again, with one more example of its use.\n\n{code}", "Translate this code to JavaScript.\n\n{code}",
)  # fmt: skip

SNIPPETS: tuple[tuple[str, str], ...] = (
    ("python", "def average(numbers):\n    total = 0\n    for n in numbers:\n        total += n\n    return total / len(numbers)"),
    ("python", "def is_prime(n):\n    for i in range(2, n):\n        if n % i == 0:\n            return False\n    return True"),
    ("python", "class Account:\n    def __init__(self, owner, balance=0):\n        self.owner = owner\n        self.balance = balance\n\n"
               "    def deposit(self, amount):\n        self.balance += amount\n\n    def withdraw(self, amount):\n        self.balance -= amount"),
    ("python", "import json\n\ndef load_users(path):\n    with open(path) as file:\n        data = json.load(file)\n    return [u['name'] for u in data]"),
    ("python", "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n\nprint([fib(i) for i in range(10)])"),
    ("python", "def count_words(text):\n    counts = {}\n    for word in text.split():\n        counts[word] = counts.get(word, 0) + 1\n    return counts"),
    ("python", "names = ['Ann', 'Bob', 'Cy']\nages = [31, 25, 47]\nfor i in range(len(names)):\n    print(names[i] + ' is ' + str(ages[i]))"),
    ("python", "def flatten(items):\n    result = []\n    for item in items:\n        if isinstance(item, list):\n            result.extend(flatten(item))\n"
               "        else:\n            result.append(item)\n    return result"),
    ("python", "def find(items, wanted):\n    low, high = 0, len(items) - 1\n    while low <= high:\n        middle = (low + high) // 2\n"
               "        if items[middle] == wanted:\n            return middle\n        if items[middle] < wanted:\n            low = middle + 1\n"
               "        else:\n            high = middle - 1\n    return -1"),
    ("python", "from datetime import date\n\ndef age(born):\n    today = date.today()\n    return today.year - born.year"),
    ("python", "def parse(line):\n    key, value = line.split('=')\n    return key.strip(), value.strip()\n\nsettings = dict(parse(l) for l in open('app.conf'))"),
    ("python", "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items.append(item)\n\n"
               "    def pop(self):\n        return self.items.pop()\n\n    def is_empty(self):\n        return len(self.items) == 0"),
    ("python", "def celsius(f):\n    return (f - 32) * 5 / 9\n\nfor f in range(0, 101, 20):\n    print(f, celsius(f))"),
    ("python", "import random\n\nsecret = random.randint(1, 100)\nguess = None\nwhile guess != secret:\n    guess = int(input('Guess: '))\n"
               "    if guess < secret:\n        print('Too low')\n    elif guess > secret:\n        print('Too high')\nprint('Right!')"),
    ("python", "def merge(a, b):\n    result = []\n    while a and b:\n        if a[0] < b[0]:\n            result.append(a.pop(0))\n"
               "        else:\n            result.append(b.pop(0))\n    return result + a + b"),
    ("javascript", "function greet(name) {\n  console.log('Hello, ' + name + '!');\n}\n\ngreet('World');"),
    ("javascript", "const numbers = [3, 8, 1, 9, 4];\nlet max = numbers[0];\nfor (let i = 1; i < numbers.length; i++) {\n"
                   "  if (numbers[i] > max) {\n    max = numbers[i];\n  }\n}\nconsole.log(max);"),
    ("javascript", "async function loadUser(id) {\n  const response = await fetch('/users/' + id);\n  const user = await response.json();\n  return user.name;\n}"),
    ("javascript", "document.querySelector('#save').addEventListener('click', () => {\n  const text = document.querySelector('#note').value;\n"
                   "  localStorage.setItem('note', text);\n});"),
    ("javascript", "function debounce(fn, wait) {\n  let timer;\n  return (...args) => {\n    clearTimeout(timer);\n    timer = setTimeout(() => fn(...args), wait);\n  };\n}"),
    ("javascript", "class Cart {\n  constructor() {\n    this.items = [];\n  }\n\n  add(item) {\n    this.items.push(item);\n  }\n\n"
                   "  total() {\n    return this.items.reduce((sum, i) => sum + i.price, 0);\n  }\n}"),
    ("sql", "SELECT customers.name, COUNT(orders.id) AS num_orders\nFROM customers\nJOIN orders ON orders.customer_id = customers.id\n"
            "GROUP BY customers.name\nORDER BY num_orders DESC;"),
    ("sql", "CREATE TABLE books (\n  id INTEGER PRIMARY KEY,\n  title TEXT NOT NULL,\n  author TEXT,\n  year INTEGER\n);"),
    ("sql", "UPDATE products SET price = price * 1.1 WHERE category = 'garden';"),
    ("sql", "SELECT name, salary FROM employees WHERE salary > (SELECT AVG(salary) FROM employees);"),
    ("bash", "#!/bin/bash\nfor file in *.txt; do\n  echo \"$file: $(wc -l < \"$file\") lines\"\ndone"),
    ("bash", "grep -i error app.log | awk '{print $1}' | sort | uniq -c | sort -rn | head -n 5"),
    ("bash", "if [ -d backup ]; then\n  tar czf backup-$(date +%F).tar.gz backup\nelse\n  echo 'no backup folder'\n  exit 1\nfi"),
    ("java", "public class Main {\n    public static int sum(int[] values) {\n        int total = 0;\n        for (int v : values) {\n"
             "            total += v;\n        }\n        return total;\n    }\n}"),
    ("c", "#include <stdio.h>\n\nint main(void) {\n    int sum = 0;\n    for (int i = 1; i <= 10; i++) {\n        sum += i;\n    }\n"
          "    printf(\"%d\\n\", sum);\n    return 0;\n}"),
    ("go", "func Reverse(s string) string {\n\trunes := []rune(s)\n\tfor i, j := 0, len(runes)-1; i < j; i, j = i+1, j-1 {\n"
           "\t\trunes[i], runes[j] = runes[j], runes[i]\n\t}\n\treturn string(runes)\n}"),
    ("rust", "fn largest(values: &[i32]) -> Option<i32> {\n    let mut best = None;\n    for &v in values {\n"
             "        if best.map_or(true, |b| v > b) {\n            best = Some(v);\n        }\n    }\n    best\n}"),
    ("html", "<ul>\n  <li><a href=\"/\">Home</a></li>\n  <li><a href=\"/about\">About</a></li>\n  <li><a href=\"/contact\">Contact</a></li>\n</ul>"),
    ("css", ".card {\n  width: 300px;\n  padding: 16px;\n  border: 1px solid #ccc;\n  border-radius: 8px;\n}\n\n.card h2 {\n  margin-top: 0;\n}"),
    ("json", "{\n  \"name\": \"shop\",\n  \"version\": \"1.0.0\",\n  \"scripts\": {\n    \"start\": \"node index.js\",\n    \"test\": \"jest\"\n  }\n}"),
    ("yaml", "services:\n  web:\n    image: shop:latest\n    ports:\n      - \"8080:80\"\n  database:\n    image: postgres:16\n    environment:\n      POSTGRES_PASSWORD: example"),
)  # fmt: skip
"""(language, code) of each."""
