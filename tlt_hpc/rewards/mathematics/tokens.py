"""The tokens of tidied answers: words of LaTeX that the grammar knows, units of values, large numbers in words."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from tlt_hpc.rewards.mathematics.node import Node, UnreadableError, number_node

UNITS = {
    word: unit
    for unit, words in {
        "mm": "mm millimeter millimeters millimetre millimetres",
        "cm": "cm centimeter centimeters centimetre centimetres",
        "m": "m meter meters metre metres", "km": "km kilometer kilometers kilometre kilometres",
        "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mi mile miles",
        "mg": "mg milligram milligrams", "g": "g gram grams", "kg": "kg kilogram kilograms",
        "lb": "lb lbs pound pounds",
        "ms": "ms millisecond milliseconds", "s": "s sec second seconds", "min": "min minute minutes",
        "h": "h hr hrs hour hours", "day": "day days", "week": "week weeks", "month": "month months",
        "year": "year years", "ml": "ml mL milliliter milliliters", "l": "L l liter liters litre litres",
        "rad": "rad radian radians", "am": "am", "pm": "pm", "degC": "degC", "degF": "degF",
    }.items()
    for word in words.split()
}  # fmt: skip
"""Units that are told apart by name; with all others a number is read as it is without them."""
MIN_WORD = 3
"""Letters of a word that is a unit behind a blank; fewer are a product, unless the unit is known."""
_MAX_UNIT_WORDS = 5
_NO_UNIT = re.compile(
    r"\b(?:or|less|more|least|most|fewer|greater|not|no|wrong|incorrect|if|unless|than|hundred|dozen|times|other|plus|minus)\b"
)
"""Words that change the value before them."""
_LARGE = re.compile(r"(?:thousand|million|billion|trillion)", re.IGNORECASE)
_LARGE_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}


def unit_name(words: str) -> str:
    """The words behind a value as the name of a unit, without layout.

    Raises:
        UnreadableError: they are no unit.
    """
    if _NO_UNIT.search(words) or len(re.findall(r"[A-Za-z]+", words)) > _MAX_UNIT_WORDS:
        raise UnreadableError("words that are no unit")
    return re.sub(r"\\text\s*|[{}\s]", "", words)


def without_unit(node: Node) -> Node:
    """The value of a node with a unit; another node as it is."""
    return node.parts[0] if node.kind == "unit" else node


def factor_of_word(node: Node) -> int:
    """The number that a word behind the value stands for, as in 1.5 million; 1 if there is none."""
    match = _LARGE.match(node.name) if node.kind == "unit" else None
    return 10 ** _LARGE_POWERS[match[0].lower()] if match else 1


def multiply_by_power_of_ten(node: Node, factor: int) -> Node:
    """The node times ``factor``, a power of ten."""
    power = Node("^", (number_node(Fraction(10)), number_node(Fraction(len(str(factor)) - 1))))
    return node if factor == 1 else Node("*", (node, power), source=f"{factor} \\cdot ({node.source})")


def canonical_unit(name: str) -> str:
    """The unit's usual sign; empty if a part of it is not known."""
    if name.startswith("mod "):
        return name
    name = name.replace(".", "")
    words = re.findall(r"[A-Za-z]+", name)
    return (
        re.sub(r"[A-Za-z]+", lambda match: UNITS[match[0]], name)
        if words and all(word in UNITS for word in words)
        else ""
    )


_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?|\.\d+)|\\text\s*\{(?P<text>[^{}]*)\}|\\begin\{(?P<begin>[a-z]+\*?)\}"
    r"|\\end\{(?P<end>[a-z]+\*?)\}|\\(?P<row>\\)(?:\[[^\]]*\])?|\\(?P<command>[A-Za-z]+|[{}|%&#_])|(?P<word>[A-Za-z]+)"
    r"|(?P<sign><=|>=|!=|=>|[-+*/^_=<>(){}\[\],;:|!%&']))"
)
FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "arccot", "sinh", "cosh", "tanh", "coth",
    "ln", "log", "lg", "exp", "gcd", "lcm", "max", "min",
})  # fmt: skip
RELATIONS = {
    "=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", "le": "<=", "leq": "<=", "leqslant": "<=",
    "ge": ">=", "geq": ">=", "geqslant": ">=", "lt": "<", "gt": ">", "ne": "!=", "neq": "!=", "in": "in",
    "approx": "~", "equiv": "==", "sim": "~", "simeq": "~",
}  # fmt: skip
SETS = {"cup": "cup", "cap": "cap", "setminus": "setminus", "backslash": "setminus", "bigcup": "cup"}
TIMES = frozenset({"*", "cdot", "times", "ast", "cdotp"})
JUNCTIONS = {"and": "and", "or": "or", "lor": "or", "vee": "or", "land": "and", "wedge": "and"}
ACCENTS = frozenset({
    "vec", "hat", "bar", "overline", "tilde", "widehat", "overrightarrow", "overleftrightarrow", "dot",
})  # fmt: skip
GREEK = frozenset({
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota", "kappa",
    "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi", "omega", "Gamma",
    "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Phi", "Psi", "Omega", "ell",
})  # fmt: skip
FIGURES = frozenset({"angle", "measuredangle", "triangle"})
FACTORS = frozenset({
    *FUNCTIONS, *GREEK, *ACCENTS, *FIGURES,
    "frac", "sqrt", "pi", "binom", "dbinom", "tbinom", "lfloor", "lceil", "infty", "lvert",
})  # fmt: skip
"""Commands that may stand behind a value as a factor without a sign."""
CLOSING = {"(": ")", "[": "]", "{": "}", "langle": "rangle", "lfloor": "rfloor", "lceil": "rceil"}


class Token(NamedTuple):
    """A token of a tidied answer, with its kind and its place in the text."""

    kind: str
    text: str
    start: int
    end: int
    after_space: bool


def split_into_tokens(text: str) -> list[Token]:
    """Split a tidied answer into tokens.

    Raises:
        UnreadableError: a part of the text is no token.
    """
    tokens, place = list[Token](), 0
    text = text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise UnreadableError(f"{text[place : place + 10]!r}")
        kind = str(match.lastgroup)
        tokens.append(Token(kind, match[kind].strip(), match.start(kind), match.end(), text[place] == " "))
        place = match.end()
    return tokens


class TokenReader:
    """A reader of the tokens of a text, in order: of all that holds no expression, such as names and subscripts."""

    def __init__(self, text: str) -> None:
        self._text, self._tokens, self._place = text, split_into_tokens(text), 0

    def _peek(self, ahead: int = 0) -> Token:
        place = self._place + ahead
        return (
            self._tokens[place]
            if place < len(self._tokens)
            else Token("end", "", len(self._text), len(self._text), False)
        )

    def _next_is(self, *texts: str, kinds: tuple[str, ...] = ("sign", "command")) -> bool:
        token = self._peek()
        return token.kind in kinds and token.text in texts

    def _consume_if_next(self, *texts: str) -> bool:
        if self._next_is(*texts):
            self._place += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._consume_if_next(text):
            raise UnreadableError(f"no {text}")

    def _next_conjunction(self) -> str:
        token = self._peek()
        if token.kind in ("word", "text", "command"):
            return JUNCTIONS.get(token.text.lower(), "")
        return ""

    def _split(self, length: int) -> None:
        """Cut the next token behind its first characters."""
        token = self._peek()
        middle = token.start + length
        parts = (
            token._replace(text=token.text[:length], end=middle),
            token._replace(text=token.text[length:], start=middle, after_space=False),
        )
        self._tokens[self._place : self._place + 1] = parts

    def _has_no_latex(self) -> bool:
        """True if the whole text is no LaTeX, where 2^10 has an exponent of two digits."""
        return "\\" not in self._text

    def _make_node(self, start: int, kind: str, *parts: Node, name: str = "", value: Fraction = Fraction(0)) -> Node:
        """A node of what was read since the token ``start``."""
        source = self._text[self._tokens[start].start : self._tokens[self._place - 1].end]
        return Node(
            kind,
            parts,
            name,
            value,
            source.replace("\\text{", "{") if kind == "number" else self._restore_backslash(start, source),
        )

    def _restore_backslash(self, start: int, source: str) -> str:
        return ("\\" if self._tokens[start].kind in ("command", "row") else "") + source

    def _starts_unit(self) -> bool:
        token = self._peek()
        if self._next_conjunction():
            return False
        if token.kind == "text":
            return True
        is_last = self._peek(1).kind == "end"
        known = token.text in UNITS and (len(token.text) > 1 or (token.after_space and is_last))
        is_word = token.kind == "word"
        return is_word and (known or (token.after_space and len(token.text) >= MIN_WORD and not token.text.isupper()))

    def _parse_subscripts(self, start: int, name: str) -> Node:
        if self._consume_if_next("_"):
            index = self._parse_subscript_text()
            name = f"{name}_{index}"
        while self._consume_if_next("'"):
            name += "'"
        return self._make_node(start, "symbol", name=name)

    def _parse_subscript_text(self) -> str:
        """The text of a subscript."""
        start = self._place
        if self._consume_if_next("{"):
            while not self._consume_if_next("}"):
                if self._peek().kind == "end":
                    raise UnreadableError("no }")
                self._place += 1
            return "".join(token.text for token in self._tokens[start + 1 : self._place - 1])
        if not self._has_no_latex() and self._peek().kind in ("number", "word") and len(self._peek().text) > 1:
            self._split(1)
        if self._peek().kind == "end":
            raise UnreadableError("no subscript")
        self._place += 1
        return self._tokens[start].text

    def _parse_number_base(self, start: int, digits: str) -> Node:
        self._expect("_")
        base = {"two": "2", "three": "3", "five": "5", "eight": "8", "ten": "10", "sixteen": "16"}
        index = self._parse_subscript_text()
        return self._make_node(start, "based", name=f"{digits} {base.get(index, index)}")
