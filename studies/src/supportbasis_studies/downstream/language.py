"""The words of the generated language: one token each, a few hundred in all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SPECIAL = ("<pad>", "<bos>", "<mask>", "<end>")
NUMBERS = tuple(str(number) for number in range(100))
GLUE = _words(
    ". , ; ? + - answer also and as code copy eats finds has how in is least lives loses many "
    "most of options plays so text the took went what where while who works"
)

FIRST_NAMES = _words(
    "ada bob cam dan eva fay gus hal ida jan kim leo mia ned ola pia quin rex sue tim una val wim "
    "xen yan zoe abe bea cal dot eli flo gil hope ivo jay kit lou max nan otto pam ray sam tess "
    "ugo vic walt"
)
FAMILY_NAMES = _words(
    "stone hill brook field wood lake marsh dale ford grove heath moor pond ridge shore vale "
    "beck cliff croft fen glen holt knoll mead"
)
CITIES = _words(
    "rome oslo lima cairo delhi paris quito tunis accra bern dakar hanoi kyiv lagos minsk osaka "
    "perth riga seoul turin utrecht vienna warsaw york zagreb athens boston cork dover essen "
    "fargo ghent"
)
JOBS = _words(
    "baker smith tailor farmer doctor pilot singer painter mason miner judge clerk sailor weaver "
    "guard cook"
)
FOODS = _words(
    "bread rice soup cheese plums beans fish honey corn figs nuts pears kale oats eggs grapes "
    "lemons peas dates cakes stew pasta olives melon"
)
INSTRUMENTS = _words(
    "flute drum harp horn cello lute organ oboe viola tuba banjo gong lyre bell fiddle zither"
)
PLACES = _words(
    "kitchen garden cellar attic office hall barn market school tower library harbour stable "
    "chapel bakery garage"
)
THINGS = _words(
    "lamp boat cup key ring rope coat box map pen hat jar fan net saw mirror basket candle "
    "hammer needle bucket blanket ladder kettle whistle anchor carpet brush chain clock comb "
    "desk flask globe jug knife mask paddle quilt spoon"
)
COLOURS = _words(
    "red blue green black white brown grey pink gold silver purple orange violet amber teal ivory"
)

WORDS = (
    *SPECIAL, *NUMBERS, *GLUE, *FIRST_NAMES, *FAMILY_NAMES, *CITIES, *JOBS, *FOODS,
    *INSTRUMENTS, *PLACES, *THINGS, *COLOURS,
)  # fmt: skip
IDS = {word: number for number, word in enumerate(WORDS)}
assert len(IDS) == len(WORDS), "a word stands twice in the language"
PAD, BOS, MASK, END = (IDS[word] for word in SPECIAL)
STOP = IDS["."]


def ids(words: str | Iterable[str]) -> list[int]:
    """The tokens of words, given as a text with spaces or one by one.

    >>> words_of(ids("ada has 17 lamp ."))
    'ada has 17 lamp .'
    """
    return [IDS[word] for word in (words.split() if isinstance(words, str) else words)]


def words_of(tokens: Sequence[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)
