"""The words of the minimal pairs: a small table, checked by hand, of common words that go together.

Nouns are singular/plural, verbs third person singular/plural. A noun is of a kind ("person", "animal", "goods" that are
bought and sold, "paper" for other small things), and a predicate says of which kinds it makes sense.
"""

from __future__ import annotations

from typing import NamedTuple


class Noun(NamedTuple):
    """`regular` plurals add -s, -es or -ies."""

    singular: str
    plural: str
    kind: str
    regular: bool

    def form(self, number: str) -> str:
        return self.singular if number == "singular" else self.plural


class Predicate(NamedTuple):
    """A verb and what follows it. `regular` verbs add -s or -es; the others are be, have and do.

    The plural is never a past tense as well (read, cost): "the boy read a book" is a sentence.
    `place` says where the subject is or lives, which does not go with a phrase that says so already.
    """

    singular: str
    plural: str
    rest: str
    kinds: frozenset[str]
    regular: bool
    place: bool

    def form(self, number: str) -> str:
        return self.singular if number == "singular" else self.plural


def _nouns(kind: str, regular: bool, words: str) -> tuple[Noun, ...]:
    forms = (word.split("/") for word in words.split())
    return tuple(Noun(singular, plural, kind, regular) for singular, plural in forms)


NOUNS = (
    *_nouns(
        "person",
        True,
        "boy/boys girl/girls teacher/teachers doctor/doctors student/students farmer/farmers singer/singers "
        "driver/drivers nurse/nurses artist/artists writer/writers lawyer/lawyers neighbor/neighbors friend/friends "
        "visitor/visitors guest/guests pilot/pilots actor/actors waiter/waiters player/players",
    ),
    *_nouns(
        "person",
        False,
        "man/men woman/women child/children policeman/policemen fireman/firemen salesman/salesmen "
        "businessman/businessmen fisherman/fishermen gentleman/gentlemen",
    ),
    *_nouns(
        "animal",
        True,
        "dog/dogs cat/cats horse/horses bird/birds cow/cows rabbit/rabbits monkey/monkeys elephant/elephants "
        "puppy/puppies",
    ),
    *_nouns("animal", False, "mouse/mice goose/geese wolf/wolves calf/calves"),
    *_nouns(
        "goods",
        True,
        "car/cars book/books picture/pictures table/tables chair/chairs box/boxes bag/bags cup/cups lamp/lamps "
        "shirt/shirts bottle/bottles phone/phones computer/computers clock/clocks watch/watches",
    ),
    *_nouns("goods", False, "knife/knives shelf/shelves scarf/scarves"),
)
LANDMARKS = _nouns(  # what people, animals and things stand beside
    "landmark",
    True,
    "tree/trees house/houses window/windows truck/trucks door/doors building/buildings bench/benches fence/fences "
    "statue/statues",
)
BESIDE = ("near", "behind", "next to", "in front of")


def _predicates(kinds: str, text: str, *, place: bool = False) -> tuple[Predicate, ...]:
    """From lines of `singular/plural rest`."""
    found = []
    for line in text.strip().splitlines():
        verb, rest = line.strip().split(" ", 1)
        singular, plural = verb.split("/")
        regular = singular not in ("is", "was", "has", "does")
        found.append(Predicate(singular, plural, rest, frozenset(kinds.split()), regular, place))
    return tuple(found)


PREDICATES = (
    *_predicates(
        "person",
        """
        walks/walk to work every day
        sings/sing in the evening
        writes/write long letters
        likes/like cold weather
        wants/want a cup of tea
        knows/know the answer
        needs/need some help
        smiles/smile all the time
        speaks/speak three languages
        works/work very hard
        looks/look tired
        seems/seem very happy
        plays/play the piano
        runs/run very fast
        laughs/laugh at every joke
        is/are very tall
        is/are ready to leave
        is/are hungry
        is/are tired
        was/were late again
        was/were very tired
        was/were happy to help
        has/have a new phone
        has/have two cats
        has/have an old bicycle
        has/have been sick
        does/do not like fish
        does/do not know the answer
        does/do not eat meat
        does/do not drink coffee
        """,
    ),
    *_predicates(
        "person",
        """
        lives/live in a small town
        works/work in a hotel
        is/are at the door
        is/are here
        was/were in the kitchen
        was/were at home
        has/have left the room
        does/do not live here
        """,
        place=True,
    ),
    *_predicates(
        "animal",
        """
        sleeps/sleep most of the day
        eats/eat a lot
        runs/run very fast
        looks/look hungry
        seems/seem very calm
        likes/like the warm sun
        needs/need some water
        is/are very young
        is/are asleep
        is/are hungry
        was/were very hungry
        was/were afraid of the noise
        has/have brown eyes
        has/have eaten all the food
        has/have been sick
        does/do not like the cold
        does/do not sleep at night
        does/do not make any noise
        """,
    ),
    *_predicates(
        "animal",
        """
        lives/live near the river
        comes/come here every night
        is/are behind the house
        was/were in the field
        has/have left the garden
        does/do not live here
        """,
        place=True,
    ),
    *_predicates(
        "goods",
        """
        seems/seem very cheap
        looks/look brand new
        seems/seem too expensive
        needs/need to be cleaned
        is/are for sale
        is/are dirty
        was/were very expensive
        was/were made in Italy
        has/have been sold
        does/do not cost much
        does/do not look new
        """,
    ),
    *_predicates(
        "goods paper",
        """
        looks/look very old
        belongs/belong to my uncle
        comes/come from another country
        needs/need to be moved
        seems/seem to be lost
        is/are missing
        is/are very old
        was/were easy to find
        was/were lost last year
        has/have disappeared
        has/have been found
        does/do not look old
        does/do not belong here
        """,
    ),
)

DETERMINERS = {  # in a subject, by number; "a" becomes "an" before a vowel
    "singular": ("the", "the", "this", "that", "a"),
    "plural": ("the", "the", "these", "those", "many", "several"),
}

COMPLEMENTS = {  # (head, preposition): what it is the owner, friend, key, picture ... of
    ("owner/owners", "of"): "dog/dogs cat/cats horse/horses car/cars house/houses shop/shops boat/boats",
    (
        "friend/friends",
        "of",
    ): "teacher/teachers student/students singer/singers girl/girls boy/boys woman/women man/men",
    ("driver/drivers", "of"): "car/cars truck/trucks bus/buses taxi/taxis van/vans",
    ("writer/writers", "of"): "book/books letter/letters story/stories article/articles song/songs",
    ("teacher/teachers", "of"): "boy/boys girl/girls student/students child/children class/classes",
    ("manager/managers", "of"): "hotel/hotels shop/shops restaurant/restaurants singer/singers player/players",
    ("child/children", "of"): "farmer/farmers doctor/doctors singer/singers lawyer/lawyers neighbor/neighbors",
    ("grandchild/grandchildren", "of"): "artist/artists fisherman/fishermen actor/actors woman/women pilot/pilots",
    ("key/keys", "to"): "door/doors room/rooms car/cars box/boxes house/houses garage/garages",
    ("picture/pictures", "of"): "lake/lakes child/children mountain/mountains dog/dogs house/houses",
    ("letter/letters", "from"): "lawyer/lawyers teacher/teachers doctor/doctors bank/banks woman/women",
    ("book/books", "about"): "king/kings war/wars planet/planets animal/animals painter/painters",
    ("gift/gifts", "from"): "friend/friends guest/guests neighbor/neighbors visitor/visitors man/men",
    ("map/maps", "of"): "city/cities island/islands mountain/mountains forest/forests river/rivers",
    ("shelf/shelves", "with"): "book/books picture/pictures bottle/bottles cup/cups clock/clocks",
}
IRREGULAR_HEADS = ("child", "grandchild", "shelf")
PERSON_HEADS = ("owner", "friend", "driver", "writer", "teacher", "manager", "child", "grandchild")

# Relative clauses are in the past tense, which has no number: the clause's own verb gives nothing away. It is none that
# takes an infinitive without "to" (see, help, let): "who saw the dogs sleep" would go on without an error.
SUBJECT_RELATIVES = {  # "who ... the doctor": verbs, and the kind of what follows
    "person": (("who", "met visited called followed thanked invited"), "person"),
    "animal": (("that", "chased followed scared attacked"), "animal"),
    "goods": (("that", "belonged_to"), "person"),
}
OBJECT_RELATIVES = {  # "that the doctor ...": who, and what was done
    "person": ("person", "met visited called followed thanked invited"),
    "animal": ("person", "fed found bought sold followed"),
    "goods": ("person", "bought found sold wanted liked"),
}

GENDERED = {
    "male": (
        *_nouns(
            "person",
            True,
            "boy/boys king/kings father/fathers brother/brothers uncle/uncles son/sons prince/princes "
            "grandfather/grandfathers waiter/waiters",
        ),
        *_nouns("person", False, "man/men gentleman/gentlemen businessman/businessmen policeman/policemen"),
    ),
    "female": (
        *_nouns(
            "person",
            True,
            "girl/girls queen/queens mother/mothers sister/sisters aunt/aunts daughter/daughters "
            "princess/princesses grandmother/grandmothers waitress/waitresses",
        ),
        *_nouns("person", False, "woman/women businesswoman/businesswomen policewoman/policewomen"),
    ),
}
NAMES = {
    "male": ("John", "David", "Peter", "Michael", "James", "Thomas", "Robert", "Paul", "Daniel", "George"),
    "female": ("Mary", "Anna", "Sarah", "Susan", "Linda", "Emma", "Laura", "Julia", "Alice", "Helen"),
}


def article(word: str) -> str:
    """The article of a word, which in this table is spoken as it is of this table are spoken as they are written.

    >>> article("artist"), article("boy")
    ('an', 'a')
    """
    return "an" if word[0] in "aeiou" else "a"


def noun(forms: str, kind: str, regular: bool) -> Noun:
    """A noun from `singular/plural`."""
    return _nouns(kind, regular, forms)[0]
