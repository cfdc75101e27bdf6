"""Examples for the adapters that ship: each task draws its own from word lists, with a fixed seed.

`python adapters/data.py sql 5` prints five training examples. Prompts of the held-out split never occur in training,
and names, cities, products, opinions and the like marked "unseen" below occur in the held-out split alone.
"""

import datetime
import json
import random
import sqlite3
import sys
from collections.abc import Callable
from typing import NamedTuple

SEED = 20250
NUM_TRAIN = 4000
NUM_HELD_OUT = 120


class Example(NamedTuple):
    """One user message and the answer wanted for it."""

    prompt: str
    answer: str


class Draw:
    """Random choices for one split: lists end with their unseen items, which only the held-out split may use."""

    def __init__(self, seed: str, held_out: bool) -> None:
        self.random = random.Random(seed)
        self.held_out = held_out

    def one(self, seen: str, unseen: str = "") -> str:
        """One of the `|`-separated items; in the held-out split the unseen ones come half the time."""
        if unseen and self.held_out and self.random.random() < 0.5:
            seen = unseen
        return self.random.choice(seen.split("|"))

    def number(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return self.random.randint(low, high)


class Task(NamedTuple):
    """What one adapter learns."""

    name: str
    summary: str
    instruction: str  # what the base model is told when it is measured "with instruction"
    draw: Callable[[Draw], Example]
    is_right: Callable[[str, str], bool]
    metric: str
    max_new_tokens: int


def split(task: Task) -> tuple[list[Example], list[Example]]:
    """The task's (train, held-out) examples: the same on every machine, no prompt twice, no prompt in both."""
    held_out = _distinct(task, Draw(f"{SEED}-{task.name}-held-out", True), NUM_HELD_OUT, set())
    taken = {example.prompt for example in held_out}
    return _distinct(task, Draw(f"{SEED}-{task.name}-train", False), NUM_TRAIN, taken), held_out


def _distinct(task: Task, draw: Draw, count: int, taken: set[str]) -> list[Example]:
    found: dict[str, Example] = {}
    # A task with few distinct prompts gives what it has.
    for _ in range(count * 20):
        example = task.draw(draw)
        if example.prompt not in taken:
            found.setdefault(example.prompt, example)
        if len(found) == count:
            break
    return list(found.values())


def exact(prediction: str, answer: str) -> bool:
    """Equal but for white space around it."""
    return prediction.strip() == answer


FIRST = "Maria|John|Aisha|Wei|Carlos|Emma|Omar|Julia|Peter|Nina|Tom|Sara|Luis|Hannah|David|Lena|Paul|Rosa|Ivan|Alice"
FIRST += "|Kofi|Priya|Marco|Elena|Yuki|Daniel|Grace|Felix|Amina|Victor|Clara|Hugo|Leila|Simon|Eva|Martin"
FIRST_UNSEEN = "Ingrid|Rafael|Zara|Oscar|Mei|Theo|Fatima|Bruno"
LAST = "Lopez|Smith|Khan|Chen|Garcia|Brown|Haddad|Weber|Novak|Rossi|Jones|Silva|Moreau|Olsen|Adeyemi|Tanaka|Kim"
LAST += "|Patel|Schmidt|Romano|Walker|Dubois|Petrov|Larsen|Ortiz|Fischer|Bianchi|Nguyen|Cohen|Murphy"
LAST_UNSEEN = "Lindgren|Castillo|Okafor|Hoffman|Sato|Keller|Marino"
JOB = "nurse|teacher|baker|lawyer|pilot|farmer|chef|plumber|dentist|painter|driver|tailor|doctor|engineer|carpenter"
JOB += "|journalist|gardener|librarian|electrician|translator"
JOB_UNSEEN = "firefighter|architect|mechanic|photographer"
CITY = "Lisbon|Berlin|Paris|Madrid|Rome|Oslo|Vienna|Tokyo|Cairo|Lima|Boston|Dublin|Prague|Athens|Delhi|Toronto"
CITY += "|Chicago|Sydney|Nairobi|Seoul|Warsaw|London|Denver|Bogota"
CITY_UNSEEN = "Helsinki|Hamburg|Seattle|Naples|Accra"
UNSEEN_NAMES = frozenset(f"{FIRST_UNSEEN}|{LAST_UNSEEN}|{CITY_UNSEEN}".split("|"))
# Only the person task draws from these: with few jobs to see, it learns the jobs and not to copy them.
MORE_JOBS = "actor|barber|butcher|cashier|clerk|coach|dancer|designer|editor|fisherman|florist|guard|historian|judge"
MORE_JOBS += "|locksmith|mason|miner|musician|optician|paramedic|pharmacist|physicist|porter|potter|programmer|sailor"
MORE_JOBS += (
    "|secretary|singer|soldier|surgeon|surveyor|trainer|waiter|welder|writer|zoologist|critic|cleric|mathematician"
)
MORE_JOBS += "|geologist|therapist|technician|magician|metalworker|midwife|manager|merchant|medic|mayor|model|monk"
TRADE = "bell|boat|book|brick|bridge|cheese|clock|cloth|fire|flag|game|gate|glass|gold|horse|iron|lamp|light|lock|paper"
TRADE += "|river|rope|sail|sea|shop|silver|snow|steel|stone|street|sugar|sword|time|water|wheel|wind|wood"
WORKER = "maker|keeper|smith|worker|seller|hunter|builder|watcher|cutter|runner|walker|painter"


def draw_job(draw: Draw) -> str:
    """A job from the lists, or, half the time in training, a compound that only copying gets right."""
    if draw.held_out or draw.random.random() < 0.5:
        return draw.one(f"{JOB}|{MORE_JOBS}", JOB_UNSEEN)
    return draw.one(TRADE) + draw.one(WORKER)


def draw_name(draw: Draw, seen: str, unseen: str) -> str:
    """A name from the lists, or, half the time in training, one made of syllables: only copying gets those right."""
    if draw.held_out or draw.random.random() < 0.5:
        return draw.one(seen, unseen)
    while True:
        syllables = [draw.one("b|br|d|f|g|h|k|kr|l|m|n|p|r|s|sh|st|t|th|v|w|z") + draw.one("a|e|i|o|u|ai|ee|ou")]
        syllables += [draw.one("b|d|k|l|ll|m|n|nd|r|rt|s|t|v") + draw.one("a|e|i|o") for _ in range(draw.number(0, 2))]
        name = ("".join(syllables) + draw.one("|n|r|s|k|ff|l|ng|tt|ck")).capitalize()
        if name not in UNSEEN_NAMES:
            return name


def draw_person(draw: Draw) -> Example:
    """A sentence about a person → JSON with name, age, job, city in this order."""
    name = f"{draw_name(draw, FIRST, FIRST_UNSEEN)} {draw_name(draw, LAST, LAST_UNSEEN)}"
    age, job, city = draw.number(18, 79), draw_job(draw), draw_name(draw, CITY, CITY_UNSEEN)
    article = "an" if job[0] in "aeiou" else "a"
    sentence = draw.random.choice(
        [
            f"{name}, {age}, is {article} {job} from {city}.",
            f"{name} is {age} years old and works as {article} {job} in {city}.",
            f"{name} is {article} {job} in {city}, aged {age}.",
            f"I met {name} ({age}) in {city}, who works as {article} {job}.",
            f"In {city} lives {name}, {article} {job} of {age}.",
            f"Meet {name}: {job}, {age}, based in {city}.",
            f"At {age}, {name} moved to {city} to work as {article} {job}.",
            f"The {job} {name} lives in {city} and is {age}.",
        ]
    )
    return Example(sentence, json.dumps({"name": name, "age": age, "job": job, "city": city}))


def same_json(prediction: str, answer: str) -> bool:
    """Equal as JSON values: spacing and the order of keys do not count."""
    try:
        return bool(json.loads(prediction) == json.loads(answer))
    except json.JSONDecodeError:
        return False


SCHEMA = """
CREATE TABLE customers (id INTEGER, name TEXT, city TEXT, age INTEGER);
CREATE TABLE products (id INTEGER, name TEXT, category TEXT, price INTEGER);
CREATE TABLE orders (id INTEGER, customer_id INTEGER, product_id INTEGER, quantity INTEGER, year INTEGER);
"""
CATEGORY = "books|toys|garden|sports|music|food|shoes|kitchen"
CATEGORY_UNSEEN = "travel|office"


def draw_sql(draw: Draw) -> Example:
    """A question about three tables → one SELECT that answers it."""
    city, category = draw.one(CITY, CITY_UNSEEN), draw.one(CATEGORY, CATEGORY_UNSEEN)
    age, price, year, top = draw.number(18, 79), draw.number(5, 500), draw.number(2010, 2025), draw.number(2, 10)
    forms = [
        (
            f"How many customers live in {city}?|Count the customers in {city}.|Number of customers from {city}?",
            f"SELECT COUNT(*) FROM customers WHERE city = '{city}';",
        ),
        (
            f"Which customers are older than {age}?|List the names of customers over {age}.|Who is older than {age}?",
            f"SELECT name FROM customers WHERE age > {age};",
        ),
        (
            f"Which customers in {city} are younger than {age}?|Who in {city} is under {age}?"
            f"|Names of customers from {city} below {age}?",
            f"SELECT name FROM customers WHERE city = '{city}' AND age < {age};",
        ),
        (
            f"What is the average age of customers in {city}?|How old are customers in {city} on average?"
            f"|Mean age in {city}?",
            f"SELECT AVG(age) FROM customers WHERE city = '{city}';",
        ),
        (
            f"Which {category} products cost less than {price}?|List {category} products under {price}."
            f"|What {category} products are cheaper than {price}?",
            f"SELECT name FROM products WHERE category = '{category}' AND price < {price};",
        ),
        (
            f"What are the {top} most expensive {category} products?|Show the top {top} {category} products by price."
            f"|The {top} priciest {category} products?",
            f"SELECT name FROM products WHERE category = '{category}' ORDER BY price DESC LIMIT {top};",
        ),
        (
            f"How many orders were placed in {year}?|Count the orders of {year}.|Number of orders in {year}?",
            f"SELECT COUNT(*) FROM orders WHERE year = {year};",
        ),
        (
            f"How many units did we sell in {year}?|Total quantity ordered in {year}?|Sum up the units sold in {year}.",
            f"SELECT SUM(quantity) FROM orders WHERE year = {year};",
        ),
        (
            f"What is the cheapest price in {category}?|Lowest {category} price?"
            f"|How cheap is the cheapest of {category}?",
            f"SELECT MIN(price) FROM products WHERE category = '{category}';",
        ),
        (
            f"How many orders came from {city}?|Count the orders of customers in {city}."
            f"|Number of orders by people in {city}?",
            "SELECT COUNT(*) FROM orders JOIN customers ON orders.customer_id = customers.id "
            f"WHERE customers.city = '{city}';",
        ),
    ]
    questions, query = draw.random.choice(forms)
    return Example(draw.one(questions), query)


def sample_database() -> sqlite3.Connection:
    """The schema with enough made-up rows that a wrong filter changes the answer."""
    draw = random.Random(SEED)
    cities, categories = f"{CITY}|{CITY_UNSEEN}".split("|"), f"{CATEGORY}|{CATEGORY_UNSEEN}".split("|")
    database = sqlite3.connect(":memory:")
    database.executescript(SCHEMA)
    customers = [(i, f"customer {i}", draw.choice(cities), draw.randint(18, 79)) for i in range(600)]
    products = [(i, f"product {i}", draw.choice(categories), draw.randint(1, 520)) for i in range(400)]
    orders = [
        (i, draw.randrange(600), draw.randrange(400), draw.randint(1, 9), draw.randint(2010, 2025)) for i in range(1500)
    ]
    database.executemany("INSERT INTO customers VALUES (?, ?, ?, ?)", customers)
    database.executemany("INSERT INTO products VALUES (?, ?, ?, ?)", products)
    database.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", orders)
    database.execute("PRAGMA query_only = ON")
    return database


def same_rows(prediction: str, answer: str) -> bool:
    """Both queries give the same rows, in the same order, on the sample database."""
    database = sample_database()
    try:
        wanted = database.execute(answer).fetchall()
        return bool(prediction.strip()) and database.execute(prediction.strip()).fetchall() == wanted
    except (sqlite3.Error, sqlite3.Warning):
        return False
    finally:
        database.close()


THING = "The battery|This phone|The hotel room|The soup|The film|Our waiter|The delivery|This jacket|The app|The book"
THING += "|The concert|The support team|This laptop|The museum|The coffee|The sound quality|The flight|The new update"
THING_UNSEEN = "The camera|The pizza|This chair|The tour guide|The game|The mattress"
GOOD = "is wonderful|is really good|was great|is excellent|was a pleasure|is better than expected|exceeded my hopes"
GOOD += "|made my day|is not bad at all|was surprisingly nice|works perfectly|is a joy to use|was delightful"
GOOD += "|is worth every penny|never lets me down|could not be better|left me smiling|is the best I have had"
GOOD_UNSEEN = "is fantastic|was superb|is amazing|was lovely|impressed everyone|is far from bad"
BAD = (
    "is terrible|is really bad|was awful|is a disappointment|was a waste of money|is worse than expected|ruined my day"
)
BAD += "|is not good at all|was unbearably slow|broke after a week|is a pain to use|was disgusting|let me down"
BAD += "|is not worth the price|never works|could not be worse|left me angry|is the worst I have had"
BAD_UNSEEN = "is horrible|was dreadful|is useless|was painful to sit through|annoyed everyone|is far from good"
PLAIN = "arrived on Tuesday|is blue|was made in Italy|has two parts|is on the second floor|was released in May"
PLAIN += "|comes in a box|is about average|is neither good nor bad|lasts two hours|starts at nine|weighs one kilo"
PLAIN += "|was moved to Monday|is the same as last year|costs ten euros|is listed on page four"
PLAIN_UNSEEN = "is red|was made in Japan|ends at noon|comes in three sizes|was announced in June|is stored downstairs"
TAIL = "|, as my sister said|, in my view|, honestly|, I have to say|, like last time|, to be fair|, says my brother"


def draw_sentiment(draw: Draw) -> Example:
    """A short remark → positive, negative or neutral."""
    label, seen, unseen = draw.random.choice(
        [("positive", GOOD, GOOD_UNSEEN), ("negative", BAD, BAD_UNSEEN), ("neutral", PLAIN, PLAIN_UNSEEN)]
    )
    return Example(f"{draw.one(THING, THING_UNSEEN)} {draw.one(seen, unseen)}{draw.one(TAIL)}.", label)


def same_label(prediction: str, answer: str) -> bool:
    """The first word is the label, whatever its case and the punctuation behind it."""
    words = prediction.split()
    return bool(words) and words[0].strip(".,:;!\"'*").lower() == answer


MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
EVENT = "The meeting is on|We moved here on|She was born on|The shop opens on|Rent is due on|The trip starts on"
EVENT += "|It was signed on|The exam takes place on|He left on|They married on"
EVENT_UNSEEN = "The warranty ends on|The store closed on|The parcel arrived on|Please reply by"


def draw_date(draw: Draw) -> Example:
    """A date, alone or in a sentence, in one of many spellings → YYYY-MM-DD."""
    day = datetime.date(1950, 1, 1) + datetime.timedelta(days=draw.number(0, 36500))
    month = MONTHS.split("|")[day.month - 1]
    short = month[:3]
    ordinal = "th" if 10 < day.day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th")
    spelling = draw.random.choice(
        [
            f"{day.day} {month} {day.year}",
            f"{month} {day.day}{ordinal}, {day.year}",
            f"{month} {day.day}, {day.year}",
            f"the {day.day}{ordinal} of {month} {day.year}",
            f"{short} {day.day}, {day.year}",
            f"{day.day}-{short}-{day.year}",
            f"{day.day:02}.{day.month:02}.{day.year}",
            f"{day.year}/{day.month}/{day.day}",
        ]
    )
    if draw.random.random() < 0.5:
        return Example(f"{draw.one(EVENT, EVENT_UNSEEN)} {spelling}.", day.isoformat())
    return Example(spelling, day.isoformat())


PIRATE = {
    "Hello": "Ahoy",
    "my": "me",
    "My": "Me",
    "friend": "matey",
    "friends": "crew",
    "you": "ye",
    "You": "Ye",
    "your": "yer",
    "is": "be",
    "are": "be",
    "money": "doubloons",
    "boss": "cap'n",
    "house": "ship",
    "yes": "aye",
    "Yes": "Aye",
    "the": "th'",
    "food": "grub",
    "drink": "grog",
    "and": "an'",
    "of": "o'",
    "for": "fer",
    "stop": "avast",
    "boat": "ship",
    "kitchen": "galley",
    "toilet": "head",
    "child": "lad",
    "quickly": "smartly",
    "No": "Nay",
}
PLACE = "in the kitchen|near the river|at the station|by the door|in the garden|at the market|behind the house"
PLACE += "|on the table|in the barn|at the bank|by the window|in the cellar|at the school|behind the church"
PLACE += "|near the forest|on the roof|at the harbor|under the tree|in the yard|at the bakery|by the fence|in the tower"
PLACE_UNSEEN = "under the bridge|at the library|in the office"
OBJECT = "money|food|map|letter|key|bag|lamp|drink|rope|book|coat|boat"
OBJECT += "|basket|bottle|box|brush|bucket|button|candle|carpet|chair|clock|cup|flag|flute|hat|jar|kettle|knife|ladder"
OBJECT += (
    "|mirror|needle|paper|pen|pillow|ring|saddle|scarf|shirt|shovel|spoon|stamp|sword|table|umbrella|wheel|whistle"
)
OBJECT_UNSEEN = "ticket|hammer|bread"
PERSON = "friend|boss|brother|doctor|child|teacher|neighbor"
PERSON += "|sister|uncle|aunt|nurse|baker|lawyer|farmer|captain|guest|student|tailor|singer|partner|nephew|painter"
PERSON_UNSEEN = "cousin|driver"
VERB = "find|bring|see|buy|sell|carry|hide|want|need|open"
VERB += "|break|borrow|burn|catch|check|choose|clean|count|cover|cut|deliver|drop|fix|hold|keep|lift|move|paint|pull"
VERB += "|push|repair|return|sort|take|throw|touch|trade|wash|wrap"
VERB_UNSEEN = "fetch|lose"
ENDING = "Arr!|Yo ho ho!|Shiver me timbers!"


def to_pirate(sentence: str) -> str:
    """The rule that the adapter has to learn: swap the words, drop the g of -ing, end with an exclamation."""
    words = []
    for word in sentence.split():
        core = word.rstrip(".,!?")
        swapped = PIRATE.get(core, core)
        if len(swapped) > 5 and swapped.endswith("ing"):
            swapped = f"{swapped[:-1]}'"
        words.append(swapped + word[len(core) :])
    # The cry depends on the last character, so that the whole answer is determined.
    cry = {"?": 2, "!": 1}.get(sentence[-1], 0)
    return f"{' '.join(words)} {ENDING.split('|')[cry]}"


def draw_pirate(draw: Draw) -> Example:
    """A plain English sentence → the same as a pirate would say it."""
    place, thing = draw.one(PLACE, PLACE_UNSEEN), draw.one(OBJECT, OBJECT_UNSEEN)
    person, verb = draw.one(PERSON, PERSON_UNSEEN), draw.one(VERB, VERB_UNSEEN)
    sentence = draw.random.choice(
        [
            f"Hello my {person}, you are late for the {thing}!",
            f"My {person} is waiting for you {place}.",
            f"Where is the {thing} of your {person}?",
            f"You are going to {verb} the {thing} and the {draw.one(OBJECT, OBJECT_UNSEEN)}.",
            f"Yes, the {thing} is {place}.",
            f"No, my {person} and I are looking for the {thing}.",
            f"Are you going to {verb} my {thing} {place}?",
            f"I {verb} the {thing} for my {person} and your friends.",
            f"Please {verb} your {thing} quickly, my {person}!",
            f"The {person} is talking of the {thing} {place}.",
        ]
    )
    return Example(sentence, to_pirate(sentence))


TASKS = {
    task.name: task
    for task in (
        Task(
            "person-json",
            "a sentence about a person → a JSON record",
            "Extract the person as JSON with the keys name, age, job, city. Answer with the JSON only. Example: "
            '"Kate Bell, 41, is a judge from Bern." gives {"name": "Kate Bell", "age": 41, "job": "judge", '
            '"city": "Bern"}.',
            draw_person,
            same_json,
            "equal as JSON",
            56,
        ),
        Task(
            "sql",
            "a question → one SQL query over customers, products, orders",
            f"Write one SQLite query for the question. Answer with the SQL only. Tables:{SCHEMA}Example: "
            "\"Who lives in Bern?\" gives SELECT name FROM customers WHERE city = 'Bern';",
            draw_sql,
            same_rows,
            "same rows in SQLite",
            56,
        ),
        Task(
            "sentiment",
            "a remark → positive, negative or neutral",
            "Is the remark positive, negative or neutral? Answer with one word. Example: "
            '"The parrot is cheerful." gives positive',
            draw_sentiment,
            same_label,
            "right label",
            6,
        ),
        Task(
            "dates",
            "a date in any spelling, alone or in a sentence → YYYY-MM-DD",
            "Write the date as YYYY-MM-DD. Answer with the date only. Example: "
            '"It rained on the 4th of May 1999." gives 1999-05-04',
            draw_date,
            exact,
            "exact match",
            14,
        ),
        Task(
            "pirate",
            "a plain sentence → the same in pirate speech",
            "Say the sentence like a pirate. Answer with the new sentence only. Example: "
            '"Hello, the dog is in your house." gives Ahoy, th\' dog be in yer ship. Arr!',
            draw_pirate,
            exact,
            "exact match",
            40,
        ),
    )
}


def main() -> None:
    """Print some training examples of one task."""
    name, count, *_ = [*sys.argv[1:], *("sql", "5")[len(sys.argv) - 1 :]]
    for example in split(TASKS[name])[0][: int(count)]:
        print(example.prompt, "→", example.answer)


if __name__ == "__main__":
    main()
