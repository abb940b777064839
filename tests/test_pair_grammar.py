"""The grammar of every generated set, checked by word lists and rules that share nothing with the generator."""

from __future__ import annotations

import re
from functools import lru_cache

import pytest

from lens_geometry import pairs as pairs_module
from lens_geometry.pairs import PAIR_SETS

load_pairs = lru_cache(pairs_module.load_pairs)  # each set is made once


def listed(words: str) -> set[str]:
    return set(words.split())


SINGULAR = listed(
    """
    boy girl teacher doctor student farmer singer driver nurse artist writer lawyer neighbor friend visitor
    guest pilot actor waiter player man woman child policeman fireman salesman businessman fisherman gentleman
    dog cat horse bird cow rabbit monkey elephant puppy mouse goose wolf calf car book picture table chair box
    bag cup lamp shirt bottle phone computer clock watch knife shelf scarf tree house window truck door building
    bench fence statue owner manager grandchild key letter gift map shop boat bus taxi van story article song
    class hotel restaurant room garage lake mountain bank king war planet animal painter city island forest
    river
    """
)
PLURAL = listed(
    """
    boys girls teachers doctors students farmers singers drivers nurses artists writers lawyers neighbors
    friends visitors guests pilots actors waiters players men women children policemen firemen salesmen
    businessmen fishermen gentlemen dogs cats horses birds cows rabbits monkeys elephants puppies mice geese
    wolves calves cars books pictures tables chairs boxes bags cups lamps shirts bottles phones computers clocks
    watches knives shelves scarves trees houses windows trucks doors buildings benches fences statues owners
    managers grandchildren keys letters gifts maps shops boats buses taxis vans stories articles songs classes
    hotels restaurants rooms garages lakes mountains banks kings wars planets animals painters cities islands
    forests rivers
    """
)
IRREGULAR = listed(
    """
    man men woman women child children policeman policemen fireman firemen salesman salesmen businessman
    businessmen fisherman fishermen gentleman gentlemen mouse mice goose geese wolf wolves calf calves knife
    knives shelf shelves scarf scarves grandchild grandchildren policewoman policewomen businesswoman
    businesswomen
    """
)
THIRD_SINGULAR = listed(
    """
    walks sings writes likes wants knows needs smiles speaks works looks seems plays runs laughs lives sleeps
    eats comes belongs is was has does
    """
)
PLURAL_VERBS = listed(
    """
    walk sing write like want know need smile speak work look seem play run laugh live sleep eat come belong
    are were have do
    """
)
IRREGULAR_VERBS = {"is", "are", "was", "were", "has", "have", "does", "do"}
MALE = listed(
    """
    boy king father brother uncle son prince grandfather waiter man gentleman businessman policeman boys kings
    fathers brothers uncles sons princes grandfathers waiters men gentlemen businessmen policemen John David
    Peter Michael James Thomas Robert Paul Daniel George
    """
)
FEMALE = listed(
    """
    girl queen mother sister aunt daughter princess grandmother waitress woman businesswoman policewoman girls
    queens mothers sisters aunts daughters princesses grandmothers waitresses women businesswomen policewomen
    Mary Anna Sarah Susan Linda Emma Laura Julia Alice Helen
    """
)
DETERMINERS = {
    "singular": {"the", "this", "that", "a", "an", "another", "one"},
    "plural": {"the", "these", "those", "many", "several", "two"},
}
AGREEMENT = [name for name in PAIR_SETS if name.startswith("agreement-")]
ONE_WORD = [name for name in PAIR_SETS if name != "negative-polarity"]


def words(sentence: str) -> list[str]:
    return re.findall(r"[A-Za-z']+", sentence)


def number_of(word: str) -> str:
    """By this file's own lists, in which no word stands twice."""
    assert (word in SINGULAR) != (word in PLURAL), word
    return "singular" if word in SINGULAR else "plural"


def different_places(good: str, bad: str) -> list[int]:
    assert len(words(good)) == len(words(bad))
    return [i for i, (one, two) in enumerate(zip(words(good), words(bad), strict=True)) if one != two]


def nouns_before(sentence: str, stop: int) -> list[str]:
    return [word for word in words(sentence)[:stop] if word in SINGULAR | PLURAL]


@pytest.mark.parametrize("name", PAIR_SETS)
def test_every_set_is_large_and_without_duplicates_and_its_sentences_are_written_as_sentences(name):
    pairs = load_pairs(name).items
    assert len(pairs) >= 400
    assert len({(pair.good, pair.bad) for pair in pairs}) == len(pairs)
    for pair in pairs:
        for sentence in (pair.good, pair.bad):
            assert re.fullmatch(r"[A-Z][A-Za-z' ]*[a-z]\.", sentence), sentence
            assert "  " not in sentence
            for article, following in re.findall(r"\b([Aa]n?) (\w+)", sentence):
                assert (article.lower() == "an") == (following[0] in "aeiou"), sentence


@pytest.mark.parametrize("name", ONE_WORD)
def test_exactly_one_word_differs_which_is_the_critical_one_and_never_the_first(name):
    for pair in load_pairs(name).items:
        (place,) = different_places(pair.good, pair.bad)
        assert place > 0
        for sentence, (start, stop) in ((pair.good, pair.good_span), (pair.bad, pair.bad_span)):
            assert sentence[start:stop] == words(sentence)[place]
            assert words(sentence[:start]) == words(sentence)[:place]


@pytest.mark.parametrize("name", AGREEMENT)
def test_the_good_verb_has_the_number_of_its_subject_and_the_bad_one_has_not(name):
    for pair in load_pairs(name).items:
        (place,) = different_places(pair.good, pair.bad)
        good, bad = words(pair.good)[place], words(pair.bad)[place]
        subject = nouns_before(pair.good, place)[0]
        determiner = words(pair.good)[0].lower()
        number = number_of(subject)
        assert determiner in DETERMINERS[number], pair.good
        assert words(pair.good)[1] == subject
        singular, plural = (good, bad) if number == "singular" else (bad, good)
        assert singular in THIRD_SINGULAR, pair
        assert plural in PLURAL_VERBS, pair
        if singular not in IRREGULAR_VERBS:
            assert singular == plural + "s"
            assert pair.features["verb"] == "regular"
        else:
            assert (singular, plural) in {("is", "are"), ("was", "were"), ("has", "have"), ("does", "do")}
            assert pair.features["verb"] == "irregular"
        assert pair.features["number"] == number
        assert pair.features["noun"] == ("irregular" if subject in IRREGULAR else "regular"), subject


@pytest.mark.parametrize("name", AGREEMENT[1:])
def test_the_noun_between_subject_and_verb_has_the_number_that_is_recorded(name):
    matches = set()
    for pair in load_pairs(name).items:
        (place,) = different_places(pair.good, pair.bad)
        subject, between = nouns_before(pair.good, place)
        assert subject != between
        assert pair.features["attractor"] == number_of(between)
        same = number_of(subject) == number_of(between)
        assert pair.features["match"] == ("same number" if same else "other number")
        matches.add(same)
    assert matches == ({False} if name == "agreement-attractor" else {True, False})


@pytest.mark.parametrize("name", AGREEMENT)
def test_no_plural_verb_is_a_past_tense_too_nor_an_infinitive_that_the_clause_could_take(name):
    past_as_well = listed("read cost cut put let set hit hurt quit shut spread beat bet burst cast fit rid split")
    with_infinitive = listed("saw see heard hear helped help let made make watched watch felt feel noticed notice had")
    for pair in load_pairs(name).items:
        (place,) = different_places(pair.good, pair.bad)
        assert not {words(pair.good)[place], words(pair.bad)[place]} & past_as_well, pair
        assert not set(words(pair.good)[2:place]) & with_infinitive, pair


def test_in_a_simple_sentence_nothing_stands_between_subject_and_verb():
    for pair in load_pairs("agreement-simple").items:
        assert different_places(pair.good, pair.bad) == [2]


def test_relative_clauses_give_the_number_away_by_no_verb_of_their_own():
    past = listed(
        "met visited called followed thanked invited chased scared attacked belonged fed found bought sold wanted liked"
    )
    for pair in load_pairs("agreement-relative").items:
        (place,) = different_places(pair.good, pair.bad)
        clause = words(pair.good)[2:place]
        assert clause[0] in ("who", "that")
        assert len(past & set(clause)) == 1
        assert set(clause) - past - SINGULAR - PLURAL <= {"who", "that", "the", "to"}
        assert (pair.template == "object relative") == (clause[1] == "the")


@pytest.mark.parametrize("name", ["anaphor-number", "anaphor-gender"])
def test_reflexives_agree_with_the_subject_in_the_good_sentence_only(name):
    for pair in load_pairs(name).items:
        (place,) = different_places(pair.good, pair.bad)
        good, bad = words(pair.good)[place], words(pair.bad)[place]
        (subject,) = (MALE | FEMALE) & set(words(pair.good)[:place])
        assert words(pair.good).index(subject) > 0
        assert (subject in MALE) != (subject in FEMALE), subject
        own, opposite = ("himself", "herself") if subject in MALE else ("herself", "himself")
        if name == "anaphor-gender":
            assert (good, bad) == (own, opposite)
            assert pair.features["gender"] == ("male" if subject in MALE else "female")
            continue
        plural = (subject.endswith("s") and subject not in ("princess", "waitress")) or subject.endswith("men")
        assert (good, bad) == (("themselves", own) if plural else (own, "themselves")), pair
        assert pair.features["number"] == ("plural" if plural else "singular")
        assert words(pair.good)[0].lower() in DETERMINERS["plural" if plural else "singular"]
        assert pair.features["noun"] == ("irregular" if subject in IRREGULAR else "regular")


def test_determiners_agree_with_the_noun_in_the_good_sentence_only():
    marked = {"singular": {"this", "that", "another", "one"}, "plural": {"these", "those", "several", "two"}}
    for pair in load_pairs("determiner-noun").items:
        (place,) = different_places(pair.good, pair.bad)
        good, bad = words(pair.good)[place], words(pair.bad)[place]
        determiner = words(pair.good)[place - (2 if pair.template == "adjective" else 1)]
        assert determiner in marked[number_of(good)], pair
        assert number_of(good) == pair.features["number"] != number_of(bad)
        assert words(pair.good)[0] in MALE | FEMALE
        assert pair.features["noun"] == ("irregular" if good in IRREGULAR else "regular")
        assert bool({good, bad} & IRREGULAR) == ({good, bad} <= IRREGULAR)


def test_a_polarity_item_stands_after_no_in_the_good_sentence_and_after_a_positive_word_in_the_bad_one():
    templates = set()
    for pair in load_pairs("negative-polarity").items:
        (place,) = different_places(pair.good, pair.bad)
        good, bad = words(pair.good)[place], words(pair.bad)[place]
        templates.add(pair.template)
        if pair.template == "adverb":
            assert good in {"often", "always", "never"}
            assert bad == "ever"
            assert "no" not in words(pair.bad)
            number = number_of(words(pair.good)[1])
            assert words(pair.good)[2] == ("has" if number == "singular" else "have")
            assert pair.good[slice(*pair.good_span)] == good
            assert pair.bad[slice(*pair.bad_span)] == "ever"
            continue
        assert (good, bad in {"some", "many", "most", "these", "several"}) == ("no", True)
        item = pair.features["item"]
        assert item in {"ever", "any", "yet"}
        for sentence, span in ((pair.good, pair.good_span), (pair.bad, pair.bad_span)):
            assert sentence[slice(*span)] == item
            assert len(words(sentence[: span[0]])) > place
            assert number_of(words(sentence)[place + 1]) == "plural"
            assert words(sentence)[place + 2] == "have"
    assert templates == {"adverb", "licensor"}


@pytest.mark.parametrize("name", PAIR_SETS)
def test_each_set_is_balanced_over_what_it_tells_apart(name):
    pairs = load_pairs(name).items
    for feature in ("number", "attractor", "gender"):
        counts = [sum(pair.features.get(feature) == value for pair in pairs) for value in
                  {pair.features[feature] for pair in pairs if feature in pair.features}]  # fmt: skip
        assert len(set(counts)) <= 1


def test_words_of_subjects_and_verbs_are_regular_and_irregular_and_varied():
    for name in AGREEMENT:
        pairs = load_pairs(name).items
        for feature in ("noun", "verb"):
            assert {pair.features[feature] for pair in pairs} == {"regular", "irregular"}
        assert len({words(pair.good)[1] for pair in pairs}) >= 20
        verbs = {pair.good[slice(*pair.good_span)] for pair in pairs}
        assert verbs >= IRREGULAR_VERBS


# A change of a word, a template or numpy's numbers changes what a set is: it then has another name in results.
DIGESTS = {
    "agreement-simple": "8aeb34e9c7e9",
    "agreement-prepositional": "85395ea7b738",
    "agreement-relative": "90de9739297b",
    "agreement-attractor": "008c0246b8a1",
    "anaphor-number": "87bed98a4423",
    "anaphor-gender": "935e5ddb8977",
    "determiner-noun": "44b1fc56c95b",
    "negative-polarity": "8b885082abf0",
}


@pytest.mark.parametrize("name", PAIR_SETS)
def test_a_set_is_the_same_pairs_every_time(name):
    first, second = load_pairs(name), pairs_module.load_pairs(name)
    assert first == second
    assert first.sha256 == second.sha256
    assert first.sha256[:12] == DIGESTS[name]


def test_agreement_is_the_four_agreement_sets_in_one():
    union = load_pairs("agreement")
    assert list(union.items) == [pair for name in AGREEMENT for pair in load_pairs(name).items]
    assert len({(pair.good, pair.bad) for pair in union.items}) == len(union.items)
