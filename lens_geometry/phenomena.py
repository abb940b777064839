"""Pairs of other phenomena: reflexives that agree in number and gender, determiners and nouns, negative polarity.

`PHENOMENA` has, by name, a function that gives the set's pairs, always the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lens_geometry.grammar import (
    BOTH,
    NUMBERS,
    REGULARITY,
    Pick,
    balanced,
    contrast,
    every,
    noun_phrase,
    nouns_of,
    other,
)
from lens_geometry.lexicon import GENDERED, NAMES
from lens_geometry.pair import Pair

REFLEXIVES = {"male": "himself", "female": "herself"}
REFLEXIVE_PHRASES = (  # what comes before the reflexive, and after it
    ("hurt", "in the kitchen"),
    ("saw", "in the mirror"),
    ("taught", "to swim"),
    ("bought", "some new clothes"),
    ("introduced", "to the teacher"),
    ("blamed", "for the mistake"),
    ("dressed", "for the party"),
    ("washed", "in the river"),
    ("cut", "with a knife"),
    ("made", "some tea"),
    ("enjoyed", "at the party"),
    ("warmed", "by the fire"),
    ("looked at", "in the mirror"),
    ("talked about", "all evening"),
    ("asked", "the same question"),
    ("hid", "behind the door"),
)

NEAR_AND_FAR = {"singular": ("this", "that"), "plural": ("these", "those")}
NUMBER_DETERMINERS = {"singular": ("this", "that", "another", "one"), "plural": ("these", "those", "several", "two")}
OBJECT_VERBS = {
    "person": ("met", "saw", "helped", "called", "thanked", "visited"),
    "animal": ("saw", "fed", "found", "bought"),
    "goods": ("bought", "sold", "found", "lost"),
}
ADJECTIVES = {
    "person": ("young", "old", "tall", "friendly", "tired"),
    "animal": ("young", "old", "small", "black", "hungry"),
    "goods": ("old", "new", "small", "black", "cheap"),
}
TIMES = ("yesterday", "last week", "this morning", "on Monday", "last summer")

LEADS = ("It seems that", "I think that", "They say that", "We know that", "It is clear that", "She says that")
UNLICENSED = ("some", "many", "most", "these", "several")  # instead of "no"
POLARITY = {  # by item: what comes before it, after "no doctors have", and after it
    "ever": (
        ("", "been to Paris"),
        ("", "seen the sea"),
        ("", "read this book"),
        ("", "lived here"),
        ("", "met the king"),
        ("", "missed the train"),
        ("", "told a lie"),
        ("", "been so tired"),
    ),
    "any": (
        ("", "money left"),
        ("", "time to rest"),
        ("", "questions"),
        ("", "experience"),
        ("", "idea what to do"),
        ("", "reason to complain"),
    ),
    "yet": (("arrived", ""), ("finished", ""), ("left", ""), ("eaten", ""), ("answered", ""), ("paid", "")),
}
ADVERBS = ("often", "always", "never")  # which need no licensor, as "ever" does
ADVERB_PHRASES = (
    "been late",
    "been kind to us",
    "liked music",
    "worked hard",
    "told the truth",
    "paid in cash",
    "been very tired",
    "helped us",
    "complained about the food",
    "been afraid of dogs",
)


def anaphor_number(pick: Pick, number: str, gender: str, regular: bool) -> Pair:
    """The boys saw themselves in the mirror, not "himself"."""
    subject = pick([one for one in GENDERED[gender] if one.regular == regular])
    verb, rest = pick(REFLEXIVE_PHRASES)
    good, bad = REFLEXIVES[gender], "themselves"
    good, bad = (good, bad) if number == "singular" else (bad, good)
    before = f"{pick(('the', 'the', *NEAR_AND_FAR[number]))} {subject.form(number)} {verb}"
    features = {"number": number, "gender": gender, "noun": REGULARITY[regular]}
    return contrast(before, good, bad, rest, "anaphor number", "noun", **features)


def anaphor_gender(pick: Pick, template: str, gender: str) -> Pair:
    """The boy (or: Yesterday John) saw himself in the mirror, not "herself".

    A name is never the first word: the first token has a place of its own, which many edits leave alone.
    """
    verb, rest = pick(REFLEXIVE_PHRASES)
    if template == "name":
        subject = f"{pick(TIMES)} {pick(NAMES[gender])}"
    else:
        subject = f"{pick(('the', 'this', 'that'))} {pick(GENDERED[gender]).singular}"
    bad = REFLEXIVES["female" if gender == "male" else "male"]
    return contrast(f"{subject} {verb}", REFLEXIVES[gender], bad, rest, "anaphor gender", template, gender=gender)


def determiner_noun(pick: Pick, template: str, number: str, regular: bool) -> Pair:
    """Mary bought these (old) books yesterday, not "these book": the noun is critical, which comes after."""
    kind = pick(("person", "animal", "goods"))
    found = pick(nouns_of(kind, regular))
    words = [pick(NUMBER_DETERMINERS[number])] + ([pick(ADJECTIVES[kind])] if template == "adjective" else [])
    before = f"{pick(NAMES['male'] + NAMES['female'])} {pick(OBJECT_VERBS[kind])} {' '.join(words)}"
    features = {"number": number, "noun": REGULARITY[regular], "determiner": words[0]}
    good, bad = found.form(number), found.form(other(number))
    return contrast(before, good, bad, pick(TIMES), "determiner-noun agreement", template, **features)


def polarity(pick: Pick, item: str) -> Pair:
    """It seems that no doctors have ever been to Paris, not "some doctors".

    The sentences differ in the licensor, and what is critical is the polarity item that it does or does not license.
    Whole sentences also compare how common "no" and "some" are, which says nothing about polarity; so this set is one
    to score by the critical word.
    """
    lead, subject = pick(LEADS), pick(nouns_of("person")).plural
    first, rest = pick(POLARITY[item])
    words = " ".join(filter(None, (subject, "have", first)))
    starts = [f"{lead} {licensor} {words}" for licensor in ("no", pick(UNLICENSED))]
    ends = f" {item} {rest}." if rest else f" {item}."
    spans = [(len(start) + 1, len(start) + 1 + len(item)) for start in starts]
    good, bad = (start + ends for start in starts)
    return Pair(good, bad, spans[0], spans[1], "negative polarity", "licensor", {"item": item})


def unlicensed_ever(pick: Pick) -> Pair:
    """The doctors have often been late, not "ever": the critical word is the adverb."""
    number = pick(NUMBERS)
    subject = noun_phrase(pick(("the", *NEAR_AND_FAR[number])), pick(nouns_of("person")).form(number))
    before = f"{subject} {'has' if number == 'singular' else 'have'}"
    return contrast(before, pick(ADVERBS), "ever", pick(ADVERB_PHRASES), "negative polarity", "adverb", item="ever")


def negative_polarity(pick: Pick, template: str, item: str) -> Pair:
    """One of the two templates."""
    return polarity(pick, item) if template == "licensor" else unlicensed_ever(pick)


PHENOMENA: dict[str, Callable[[], tuple[Pair, ...]]] = {
    "anaphor-number": partial(
        balanced,
        anaphor_number,
        every(number=NUMBERS, gender=("male", "female"), regular=BOTH),
        each=60,
        seed=5,
    ),
    "anaphor-gender": partial(
        balanced, anaphor_gender, every(template=("noun", "name"), gender=("male", "female")), each=120, seed=6
    ),
    "determiner-noun": partial(
        balanced, determiner_noun, every(template=("noun", "adjective"), number=NUMBERS, regular=BOTH), each=60, seed=7
    ),
    "negative-polarity": partial(
        balanced,
        negative_polarity,
        [*every(template=["licensor"], item=list(POLARITY)), {"template": "adverb", "item": "ever"}],
        each=120,
        seed=8,
    ),
}
