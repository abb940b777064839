"""Subject-verb agreement pairs, built from the lexicon. Each set holds equally many pairs of every kind it tells apart.

`AGREEMENT` has, by name, a function that gives the set's pairs, always the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, TypeVar

import numpy as np

from lens_geometry.lexicon import (
    BESIDE,
    COMPLEMENTS,
    DETERMINERS,
    IRREGULAR_HEADS,
    LANDMARKS,
    NOUNS,
    OBJECT_RELATIVES,
    PERSON_HEADS,
    PREDICATES,
    SUBJECT_RELATIVES,
    Noun,
    Predicate,
    article,
    noun,
)
from lens_geometry.pair import Pair

T = TypeVar("T")
Kinds = Sequence[dict[str, Any]]
NUMBERS = ("singular", "plural")
SUBJECT_KINDS = ("person", "person", "animal", "goods")  # people are half of the subjects
REGULARITY = {True: "regular", False: "irregular"}


class Pick:
    """Draws from sequences; its numbers are those of one seeded generator."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def __call__(self, choices: Sequence[T]) -> T:
        return choices[int(self.generator.random() * len(choices))]


def balanced(build: Callable[..., Pair], kinds: Kinds, *, each: int, seed: int) -> tuple[Pair, ...]:
    """`each` different pairs of every kind, one of each kind in turn; `build(pick, **kind)` makes one."""
    pick, found = Pick(seed), dict[tuple[str, str], Pair]()
    for size, kind in enumerate((kind for _ in range(each) for kind in kinds), 1):
        while len(found) < size:  # draws that were there already are drawn again
            pair = build(pick, **kind)
            found.setdefault((pair.good, pair.bad), pair)
    return tuple(found.values())


def every(**choices: Sequence[Any]) -> Kinds:
    """Every combination of the choices, as keyword arguments."""
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def contrast(before: str, good: str, bad: str, after: str, phenomenon: str, template: str, **features: str) -> Pair:
    """A pair of sentences that differ in one word, the critical one."""
    start = before[0].upper() + before[1:]
    end = f" {after}." if after else "."
    place = len(start) + 1
    spans = (place, place + len(good)), (place, place + len(bad))
    return Pair(f"{start} {good}{end}", f"{start} {bad}{end}", spans[0], spans[1], phenomenon, template, features)


def other(number: str) -> str:
    """The other number."""
    return "plural" if number == "singular" else "singular"


def noun_phrase(determiner: str, *words: str) -> str:
    """Determiner, adjectives and noun, with "a" as "an" where it has to be."""
    return " ".join([article(words[0]) if determiner == "a" else determiner, *words])


def nouns_of(kind: str, regular: bool | None = None) -> list[Noun]:
    """The nouns of a kind."""
    return [one for one in NOUNS if one.kind == kind and regular in (None, one.regular)]


def predicates_of(kind: str, *, regular: bool | None = None, place: bool = False) -> list[Predicate]:
    """The predicates that make sense of a kind; those that say where it is only with `place`."""
    return [
        one for one in PREDICATES if kind in one.kinds and regular in (None, one.regular) and (place or not one.place)
    ]


def agreement(subject: str, number: str, predicate: Predicate, template: str, **features: str) -> Pair:
    """The pair of a subject with its verb in both forms; `number` is that of the subject's head."""
    good, bad = predicate.form(number), predicate.form(other(number))
    features = {"number": number, **features, "verb": REGULARITY[predicate.regular]}
    return contrast(subject, good, bad, predicate.rest, "subject-verb agreement", template, **features)


def simple(pick: Pick, number: str, regular: bool, verb: bool) -> Pair:
    """The boy walks to work every day."""
    subject = pick(nouns_of(pick(SUBJECT_KINDS), regular))
    phrase = noun_phrase(pick(DETERMINERS[number]), subject.form(number))
    predicate = pick(predicates_of(subject.kind, regular=verb, place=True))
    return agreement(phrase, number, predicate, "simple", noun=REGULARITY[regular])


def prepositional(pick: Pick, number: str, attractor: str, regular: bool) -> Pair:
    """The boy near the trees walks to work every day."""
    subject = pick(nouns_of(pick(SUBJECT_KINDS), regular))
    beside = LANDMARKS if subject.kind == "goods" else pick((LANDMARKS, nouns_of("person"), nouns_of("animal")))
    intervening = pick([one for one in beside if one != subject])
    phrase = f"the {subject.form(number)} {pick(BESIDE)} the {intervening.form(attractor)}"
    predicate = pick(predicates_of(subject.kind))
    return agreement(
        phrase, number, predicate, "prepositional", **_intervening(number, attractor), noun=REGULARITY[regular]
    )


def relative(pick: Pick, template: str, number: str, attractor: str, regular: bool) -> Pair:
    """The boy who met the doctors (or: that the doctors met) walks to work every day."""
    subject = pick(nouns_of(pick(SUBJECT_KINDS), regular))
    if template == "subject relative":
        (pronoun, verbs), kind = SUBJECT_RELATIVES[subject.kind]
    else:
        kind, verbs = OBJECT_RELATIVES[subject.kind]
    intervening = pick([one for one in nouns_of(kind) if one != subject]).form(attractor)
    verb = pick(verbs.split()).replace("_", " ")
    clause = (
        f"{pronoun} {verb} the {intervening}" if template == "subject relative" else f"that the {intervening} {verb}"
    )
    phrase = f"the {subject.form(number)} {clause}"
    predicate = pick(predicates_of(subject.kind))
    return agreement(phrase, number, predicate, template, **_intervening(number, attractor), noun=REGULARITY[regular])


def complement(pick: Pick, number: str, person: bool) -> Pair:
    """The owner of the dogs walks to work every day; the noun between is always of the other number."""
    heads = [head for head in COMPLEMENTS if (head[0].split("/")[0] in PERSON_HEADS) == person]
    forms, preposition = pick(heads)
    regular = forms.split("/")[0] not in IRREGULAR_HEADS
    head = noun(forms, "person" if person else "paper", regular)
    attractor = other(number)
    inside = noun(pick(COMPLEMENTS[forms, preposition].split()), "", True).form(attractor)
    phrase = f"the {head.form(number)} {preposition} the {inside}"
    predicate = pick(predicates_of(head.kind))
    return agreement(
        phrase, number, predicate, "complement", **_intervening(number, attractor), noun=REGULARITY[regular]
    )


def _intervening(number: str, attractor: str) -> dict[str, str]:
    return {"attractor": attractor, "match": "same number" if number == attractor else "other number"}


BOTH = (True, False)
AGREEMENT: dict[str, Callable[[], tuple[Pair, ...]]] = {
    "agreement-simple": partial(balanced, simple, every(number=NUMBERS, regular=BOTH, verb=BOTH), each=60, seed=1),
    "agreement-prepositional": partial(
        balanced, prepositional, every(number=NUMBERS, attractor=NUMBERS, regular=BOTH), each=60, seed=2
    ),
    "agreement-relative": partial(
        balanced,
        relative,
        every(template=("subject relative", "object relative"), number=NUMBERS, attractor=NUMBERS, regular=BOTH),
        each=30,
        seed=3,
    ),
    "agreement-attractor": partial(balanced, complement, every(number=NUMBERS, person=BOTH), each=120, seed=4),
}
