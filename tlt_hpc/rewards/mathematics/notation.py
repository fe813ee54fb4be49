r"""Brings an answer's notation to one form: what Unicode, Markdown and LaTeX write in several ways is written in one.

Nothing here knows what an expression means. ``normalise_notation`` returns LaTeX without layout: no ``$``, no spacing
commands, no ``\left``, braces around the arguments of fractions and roots.
"""

from __future__ import annotations

import re
import unicodedata

_SIGNS = {
    **dict.fromkeys("\u2212\u2013\u2014\u2010\u2011\u2012\ufe63\ufe58", "-"),
    **dict.fromkeys("\u00d7\u2a2f", "\\times "), **dict.fromkeys("\u00b7\u22c5\u2219\u2022", "\\cdot "),
    "\u00f7": "/", "\u2215": "/", "\u2044": "/", "\u2217": "*", "\u2264": "\\le ", "\u2265": "\\ge ",
    "\u2a7d": "\\le ", "\u2a7e": "\\ge ", "\u2260": "\\ne ", "\u2248": "\\approx ", "\u221e": "\\infty ",
    "\u00b1": "\\pm ", "\u2213": "\\mp ", "\u222a": "\\cup ", "\u2229": "\\cap ", "\u2208": "\\in ",
    "\u2205": "\\emptyset ", "\u00d8": "\\emptyset ", "\u2216": "\\setminus ", "\u211d": "\\mathbb{R}",
    "\u2124": "\\mathbb{Z}", "\u2115": "\\mathbb{N}", "\u211a": "\\mathbb{Q}", "\u00b0": "\\degree ",
    "\u00ba": "\\degree ", "\u2103": "\\degree C", "\u2109": "\\degree F",
    "\u2032": "'", "\u2019": "'", "\u3001": ",", "\u3002": ".", "\u2061": "", "\u2062": "",
    "\u200b": "", "\ufeff": "", "\u2227": "\\land ", "\u2228": "\\lor ", "\u27e8": "\\langle ",
    "\u27e9": "\\rangle ", "\u230a": "\\lfloor ", "\u230b": "\\rfloor ", "\u2308": "\\lceil ", "\u2309": "\\rceil ",
    "\u2223": "|", "\u2236": ":", "\u00ac": "\\neg ", "\u2220": "\\angle ", "\u2026": "\\ldots ",
}  # fmt: skip
_GREEK = (
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu",
    "xi", "omicron", "pi", "rho", "varsigma", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega",
)  # fmt: skip
_ABOVE_LINE = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207f"
_SUPERSCRIPTS = dict(zip(_ABOVE_LINE, "0123456789+-n", strict=True))
_SUBSCRIPTS = dict(zip("\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089", "0123456789", strict=True))
_TABLE = str.maketrans({
    **_SIGNS,
    **{chr(0x3B1 + number): f"\\{name} " for number, name in enumerate(_GREEK)},
    "\u03a9": "\\Omega ", "\u0394": "\\Delta ", "\u0393": "\\Gamma ", "\u03a3": "\\Sigma ", "\u03a6": "\\Phi ",
})  # fmt: skip
_ABOVE = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_BELOW = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_ROOT = re.compile(r"([\u221a\u221b\u221c])\s*(\d+(?:\.\d+)?|[A-Za-z]|(?=[({\\]))")
_LAYOUT = re.compile(
    r"\\(?:left|right|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr|biggl|biggr|displaystyle|textstyle|limits|nolimits|middle)"
    r"(?![A-Za-z])|(?<!\\)\\[()\[\]]|(?<!\\)\$|\\(?:phantom|hspace|vspace|color|textcolor)\*?\{[^{}]*\}"
    r"|\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge|blacksquare|qed|checkmark)(?![A-Za-z])"
)
_CURRENCY = re.compile(
    r"\\(?:\$|(?:pounds?|euro|textdollar|textcent)(?![A-Za-z]))|[\u20ac\u00a2\u00a3\u00a5]"
    r"|(?<![A-Za-z])(?:(?:US|USD)\s*(?=\$)|USD\s*(?=\d))"
)
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:\\[,!;: ]|\{,\}|,\\!|\{\\,\}|~|,)\d{3})+)(?![\d])(?!,\d)")
_PLAIN_COMMA = re.compile(r",\d")
_SPACED_THOUSANDS = re.compile(
    r"(?<![\d.,] )(?<![\d.,/])([1-9]\d{0,2})((?:[ \u00a0\u2009\u202f]\d{3})+)(?![\d])(?! \d)"
)
_SPACING = re.compile(r"(?<!\\)\\[,;:!> ]|\\(?:quad|qquad|enspace|thinspace|nobreakspace)(?![A-Za-z])|~|\s+")
_STYLE = re.compile(r"\\(?:mathbf|mathsf|mathit|mathcal|boldsymbol|bm|bf|it|rm|pmb|ensuremath)(?![A-Za-z])\s*")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal|up|sc)?|mathrm|mbox|hbox|operatorname\*?|emph|underline)\s*\{")
_NAMES = re.compile(
    r"\\text\{\s*(?:(sqrt|sin|cos|tan|cot|csc|ln|log|exp|arcsin|arccos|arctan|gcd|lcm|e|i|pi)\s*\}|(sec|max|min)\s*\}(?=\s*[({]))"
)
_DEGREES = re.compile(
    r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\(?:textdegree|degrees?)(?![A-Za-z])|(?<=\d)\s*degrees?\b"
)
_REPEATING = re.compile(
    r"(\d*)\.(\d*)\s*(?:\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))|\\dot\s*\{?(\d)\}?(?:(\d*)\s*\\dot\s*\{?(\d)\}?)?)"
)
_TAKES_ARGUMENTS = re.compile(r"\\[dtc]?(frac|binom|sqrt|pmod)(?![A-Za-z])\s*((?<=sqrt)\[[^\]]*\])?")
_FUNCTION = re.compile(
    r"(?<![\\A-Za-z])(arcsin|arccos|arctan|asin|acos|atan|sinh|cosh|tanh|sqrt|sin|cos|tan|cot"
    r"|sec(?=\s*[({\\])|csc|ln|log|exp|pi|infinity|inf|oo)(?![A-Za-z])"
)
"""``sec`` and, in ``\\text{}``, ``min`` and ``max`` only before an argument: 5 sec and 5 min are times."""
_COMMANDS = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "infinity": "infty", "inf": "infty", "oo": "infty"}
_PLAIN_ARGUMENT = re.compile(r"(?:\\sqrt|\^)\s*\(")
"""A root or power whose argument stands in round brackets."""
_MAX_WRAPPINGS = 3
"""Marks of style and labels within each other."""
_EDGES = re.compile(r"^(?:\*\*|__)++|(?<![*_])(?:\*\*|__)++(?=[\s.,;:!]*+$)")
_EMPHASIS = re.compile(r"^(\*\*|__|\*|_|`)(.+)\1$", re.DOTALL)
_LABEL = re.compile(
    r"^\s*(?:\\text\s*\{(?![^{}]*\b(?:not|except)\b)[^{}]*(?::|\bis|\bare)\s*\}"
    r"|(?:the )?(?:final )?answer\s*(?:is\b|[:=])"
    r"|(?:=|\\approx(?![A-Za-z]))(?=[^=]*$))\s*",
    re.IGNORECASE,
)
"""Words that only announce the answer."""
_CLOCK = re.compile(r"(?<=\d)(?:\\ |[\s~])*(?:\\text\s*\{\s*)?([ap])\.?\s?m\b\.?\s*\}?", re.IGNORECASE)
_ANY_DOTS = re.compile(r"\\[cd]?dots(?![A-Za-z])")
_DOTS = re.compile(r"(\.\d+)\s*\\ldots\s*$")
_TO = re.compile(r"(?<=\d)\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=\d)")
_ARRAY = re.compile(r"[(\[]\s*\\begin\{array\}\s*\{[^{}]*\}(.*?)\\end\{array\}\s*[)\]]", re.DOTALL)
_BASED = re.compile(r"\((\w+)\)(?=_)|(?<=_)(\{)\((\w+)\)(?=\})")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}|^([^{}]*)\\choose(?![A-Za-z])([^{}]*)$")
_ONE_MEASURE = re.compile(r"^\\text\{\s*(-?[\d.,/]*\d)([^{}\d]*)\}$")
_ALL_TEXT = re.compile(r"^\\text\{\s*(-?[\d.][^{}]*)\}$")
"""Text that begins with a number."""
_ALL_REAL = re.compile(r"(?:\\text\s*\{)?\s*all (?:real numbers|reals)\s*\}?", re.IGNORECASE)
_OUTSIDE = re.compile(r"^[ ,;:!'.]+(?!\d)(?<!\.)|^[ ,;:!']+|(?:(?<=[A-Za-z]{2})!)?[ .,;:']+$|(?<=[A-Za-z]{2})!$")
"""Marks around words that belong to no number."""
_VERDICTS = frozenset({"yes", "no", "true", "false", "none"})
"""Words that mean the same in capitals; other capitals may name points or people."""
_SCIENTIFIC = re.compile(
    r"(?<![A-Za-z\d])(?:(\d*\.\d*)[eE]([-+]?\d{1,4})|(\d+)[eE](\d{1,4}|[-+]\d{2,4}|(?<=1[eE])[-+]\d))(?![\d.A-Za-z])"
)
"""With a sign an exponent of one digit needs a point or a 1: 2e-1 is 2 times e, less 1."""
_MAX_DEPTH = 40


def normalise_notation(answer: str, commas_separate: bool = False) -> str:
    """The answer in one notation, at most a few times as long; ``commas_separate``: no comma stands in a number."""
    text = _unicode_to_latex(answer.strip())
    for _ in range(_MAX_WRAPPINGS):
        text = _LABEL.sub("", _EDGES.sub("", _EMPHASIS.sub(r"\2", text))).strip()
    text = _CURRENCY.sub("", text)
    text = _LAYOUT.sub(
        " ", text.replace("\\left.", "").replace("\\right.", "").replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    )
    text = _TEXT.sub(r"\\text{", _STYLE.sub("", text)).replace("\\text{ %}", "\\%").replace("\\Bbb", "\\mathbb")
    text = text.replace("\\log_e ", "\\ln ").replace("\\log_{e}", "\\ln ")
    text = _ALL_TEXT.sub(r"\1", _ONE_MEASURE.sub(r"\1\\text{\2}", re.sub(r"\\text\{\s*\}", " ", text)))
    text = _NAMES.sub(lambda match: f"\\{name} " if len(name := match[1] or match[2]) > 1 else name, text)
    text = _DEGREES.sub(r"\\degree ", text)
    text = _ANY_DOTS.sub(r"\\ldots", text.replace("{:}", ":"))
    text = _CLOCK.sub(lambda match: f"\\text{{ {match[1].lower()}m}}", text)
    text = _TO.sub(":", _ARRAY.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", _DOTS.sub(r"\1", text)))
    text = _CHOOSE.sub(lambda match: f"\\binom{{{match[1] or match[3]}}}{{{match[2] or match[4]}}}", text)
    text = _BASED.sub(lambda match: f"{match[2] or ''}{match[1] or match[3]}", text)
    text = _REPEATING.sub(_repeating_decimal_to_fraction, text)
    text = _SCIENTIFIC.sub(lambda each: f"{each[1] or each[3]}\\cdot 10^{{{each[2] or each[4]}}}", text)
    text = _SPACING.sub(" ", _remove_thousands_separators(text, commas_separate)).strip()
    text = text.rstrip(" .,;:\\")
    if _ALL_REAL.fullmatch(text):
        return "\\mathbb{R}"
    return _brace_command_arguments(_words_to_commands(text.replace("**", "^")))


def _words_to_commands(text: str) -> str:
    """The text with LaTeX's commands for functions and constants that are written as words."""
    text = _FUNCTION.sub(lambda match: f"\\{_COMMANDS.get(match[1], match[1])} ", text)
    opened = {match.end() - 1 for match in _PLAIN_ARGUMENT.finditer(text)}
    if not opened:
        return text
    characters, open_brackets = list(text), list[int]()
    for index, character in enumerate(text):
        if character == "(":
            open_brackets.append(index)
        elif character == ")" and open_brackets and (start := open_brackets.pop()) in opened:
            characters[start], characters[index] = "{", "}"
    return "".join(characters)


def _has_insignificant_capitals(word: str) -> bool:
    """True if a word's capitals say nothing: they begin a sentence, or are no name's."""
    return len(word) > 1 and (word[1:] == word[1:].lower() or word.lower() in _VERDICTS)


def to_plain_words(tidied: str) -> str:
    """A tidied answer as words, for answers that are no mathematics: without commands of style and capitals."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", tidied)
    text = re.sub(r"(?<=[a-z])\.(?=[a-z])", "", re.sub(r"(?<![0-9])\{(\w)\}", r" \1", text))
    words = _OUTSIDE.sub("", re.sub(r"[`\"]|\*(?!\s*[\d(\\])", " ", text)).split()
    words = [word.lower() if _has_insignificant_capitals(word) else word for word in words]
    if len(words) > 1 and words[0].lower() in ("a", "an", "the") and re.match("[a-z]{2}", words[1]):
        del words[0]
    return re.sub(r"^\((\w+)\)$", r"\1", " ".join(words))


def closing_brace(text: str, start: int) -> int:
    """The index of the brace that closes the one before ``start``; -1 if there is none."""
    depth, index = 1, start
    while index < len(text):
        if text[index] == "\\":
            index += 1
        elif text[index] in "{}":
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return index
        index += 1
    return -1


def _unicode_to_latex(text: str) -> str:
    if text.isascii():
        return text
    text = "".join(unicodedata.normalize("NFKC", char) if 0xFF00 <= ord(char) <= 0xFFEF else char for char in text)
    text = _VULGAR.sub(_vulgar_fraction_to_latex, text)
    text = _ABOVE.sub(lambda match: "^{" + "".join(_SUPERSCRIPTS[char] for char in match[0]) + "}", text)
    text = _BELOW.sub(lambda match: "_{" + "".join(_SUBSCRIPTS[char] for char in match[0]) + "}", text)
    text = _ROOT.sub(_root_to_latex, text)
    return text.replace("\u03c0", "\\pi ").translate(_TABLE)


def _vulgar_fraction_to_latex(match: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return f"\\frac{{{above}}}{{{below}}}"


def _root_to_latex(match: re.Match[str]) -> str:
    degree = {"\u221a": "", "\u221b": "[3]", "\u221c": "[4]"}[match[1]]
    return f"\\sqrt{degree}{{{match[2]}}}" if match[2] else f"\\sqrt{degree}"


def _remove_thousands_separators(text: str, commas_separate: bool) -> str:
    """Numbers without marks between their thousands; in brackets a comma separates."""

    def joined(match: re.Match[str]) -> str:
        before = text[: match.start()]
        depth = sum(map(before.count, ("(", "[", "\\{"))) - sum(map(before.count, (")", "]", "\\}")))
        is_list = (depth > 0 or commas_separate) and _PLAIN_COMMA.search(match[2])
        return match[0] if is_list else match[1] + re.sub(r"\D", "", match[2])

    return _SPACED_THOUSANDS.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), _THOUSANDS.sub(joined, text))


def _repeating_decimal_to_fraction(match: re.Match[str]) -> str:
    whole, fixed, block = match[1] or "0", match[2], "".join(filter(None, match.groups()[2:]))
    if len(whole + fixed + block) > 200:
        return match[0]
    nines = (10 ** len(block) - 1) * 10 ** len(fixed)
    return f"\\frac{{{int(whole + fixed + block) - int(whole + fixed)}}}{{{nines}}}"


def _brace_command_arguments(text: str, depth: int = 0) -> str:
    r"""The text with ``\frac`` for all its forms, and braces around the arguments of fractions and roots."""
    if depth > _MAX_DEPTH:
        return text
    parts, end = list[str](), 0
    for match in _TAKES_ARGUMENTS.finditer(text):
        if match.start() < end:
            continue
        parts.append(text[end : match.start()])
        arguments, end = list[str](), match.end()
        for _ in range(2 if match[1] in ("frac", "binom") else 1):
            argument, end = _parse_tex_argument(text, end)
            arguments.append(f"{{{_brace_command_arguments(argument, depth + 1)}}}")
        parts.append(f"\\{match[1]}{match[2] or ''}{''.join(arguments)}")
    return "".join(parts) + text[end:]


def _parse_tex_argument(text: str, start: int) -> tuple[str, int]:
    """An argument as TeX takes it, a group or one character or command, and the index behind it."""
    while start < len(text) and text[start] == " ":
        start += 1
    if text[start : start + 1] == "{":
        end = closing_brace(text, start + 1)
        return (text[start + 1 : end], end + 1) if end >= 0 else (text[start + 1 :], len(text))
    command = re.compile(r"\\[A-Za-z]+").match(text, start)
    if command is None:
        return text[start : start + 1], start + 1
    if command[0] == "\\sqrt" and text[command.end() : command.end() + 5] != "\\sqrt":
        inner, end = _parse_tex_argument(text, command.end())
        return f"\\sqrt{{{inner}}}", end
    return command[0], command.end()
