r"""Reads one answer as mathematics: a tree of what is written, from tidied LaTeX or plain text.

What the grammar does not have is refused: nothing is skipped, so no part of an answer is left out of a comparison.
"""

from __future__ import annotations

from fractions import Fraction

from tlt_hpc.rewards.mathematics.node import Node, UnreadableError
from tlt_hpc.rewards.mathematics.tokens import (
    ACCENTS,
    CLOSING,
    FACTORS,
    FIGURES,
    FUNCTIONS,
    GREEK,
    RELATIONS,
    SETS,
    TIMES,
    TokenReader,
    unit_name,
)

MAX_CHARACTERS = 5000
_MAX_DIGITS = 4300
"""Digits of a number: Python reads no more."""
_MAX_DEPTH = 40
_MAX_PRODUCT = 4
"""Letters that are read as a product of variables; a longer word is none."""


def parse_expression(tidied: str) -> Node:
    """The tree of an answer in the notation of ``normalise_notation``.

    Raises:
        UnreadableError: it is no mathematics that the grammar has.
    """
    if len(tidied) > MAX_CHARACTERS:
        raise UnreadableError("too long")
    return _Parser(tidied).parse_all()


class _Parser(TokenReader):
    """One pass from left to right; each method reads what its name says from the next token on."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._bars = 0
        """Bars of absolute values that are open."""
        self._in_builder = False

    def parse_all(self) -> Node:
        """The tree of all tokens.

        Raises:
            UnreadableError: they are none of the grammar's.
        """
        node = self._parse_list()
        if self._place < len(self._tokens):
            raise UnreadableError(self._peek().text)
        return node

    # --- from the loosest binding to the tightest ---

    def _parse_list(self) -> Node:
        """Relations separated by commas, semicolons, "and" or "or"."""
        start, items, words = self._place, [self._parse_relation()], set[str]()
        while True:
            is_comma = self._consume_if_next(",", ";")
            word = self._next_conjunction()
            if word:
                self._place += 1
                words.add(word)
            elif not is_comma:
                break
            item = self._parse_relation()
            if items[-1].kind == "relation" and items[-1].name == "!=" and item.kind != "relation":  # x \ne 1, 2
                item = Node("relation", (items[-1].parts[0], item), "!=", source=item.source)
            items.append(item)
        if len(items) == 1:
            return items[0]
        is_claim = all(item.kind == "relation" and item.name != "=" for item in items)
        if is_claim and len(words) == 1:
            return self._make_node(start, words.pop(), *items)
        return self._make_node(start, "group", *items)

    def _parse_relation(self) -> Node:
        start, sides, signs = self._place, [self._parse_set_operations()], list[str]()
        if self._next_is(":") and not self._in_builder:
            while self._consume_if_next(":"):
                sides.append(self._parse_sum())
            return self._make_node(start, "ratio", *sides)
        while (token := self._peek()).kind in ("sign", "command") and token.text in RELATIONS:
            self._place += 1
            if token.text == "in" and self._consume_if_next("("):  # \in( is no sign of its own: give the bracket back
                self._place -= 1
            signs.append(RELATIONS[token.text])
            sides.append(self._parse_set_operations())
        return self._make_node(start, "relation", *sides, name=" ".join(signs)) if signs else sides[0]

    def _parse_set_operations(self) -> Node:
        start, node = self._place, self._parse_sum()
        while (token := self._peek()).kind == "command" and token.text in SETS:
            self._place += 1
            right = self._parse_sum()
            if SETS[token.text] == "setminus" and right.kind == "number":  # braces without backslashes
                right = Node("group", (right,), "{}")
            node = self._make_node(start, SETS[token.text], node, right)
        return node

    def _parse_sum(self) -> Node:
        start = self._place
        node = self._parse_signed_term()
        while self._next_is("+", "-", "pm", "mp"):
            sign = self._peek().text
            self._place += 1
            term = self._parse_product()
            if sign == "-" and term.kind == "group" and term.name == "{}":
                node = self._make_node(start, "setminus", node, term)
                continue
            if sign == "-":
                term = Node("neg", (term,))
            node = self._make_node(start, "pm" if sign in ("pm", "mp") else "+", node, term)
        return node

    def _parse_signed_term(self) -> Node:
        start, signs = self._place, 0
        if self._consume_if_next("pm", "mp"):
            return self._make_node(start, "pm", self._parse_product())
        while self._next_is("-", "+"):
            signs += self._peek().text == "-"
            self._place += 1
        node = self._parse_product()
        return self._make_node(start, "neg", node) if signs % 2 else node

    def _parse_product(self) -> Node:
        start = self._place
        node = self._parse_power()
        while True:
            token = self._peek()
            if token.kind in ("sign", "command") and token.text in TIMES:
                self._place += 1
                node = self._make_node(start, "*", node, self._parse_factor())
            elif self._next_is("/", "div"):
                self._place += 1
                node = self._make_node(start, "/", node, self._parse_factor())
            elif self._consume_if_next("pmod"):
                modulus = self._parse_argument()
                node = Node("unit", (node,), f"mod {modulus.source}", source=node.source)
            elif self._starts_unit():
                node = self._parse_unit_words(start, node)
            elif self._starts_factor():
                node = self._parse_juxtaposed_product(start, node)
            else:
                return node

    def _parse_factor(self) -> Node:
        """A factor behind a sign of multiplication, which may have a sign of its own."""
        start = self._place
        if self._consume_if_next("-"):
            return self._make_node(start, "neg", self._parse_power())
        return self._parse_power()

    def _parse_juxtaposed_product(self, start: int, left: Node) -> Node:
        """A product without a sign, or a mixed number."""
        token = self._peek()
        right = self._parse_power()
        is_whole = left.kind == "number" and left.value.denominator == 1 and "." not in left.source
        behind, fraction = ("", right) if right.kind == "/" else (right.kind, right.parts[0] if right.parts else right)
        is_fraction = token.text == "frac" and fraction.kind == "/" and _are_integers(fraction.parts)
        if is_whole and is_fraction and behind in ("", "percent", "degree"):
            mixed = self._make_node(start, "+", left, fraction)
            return Node(behind, (mixed,), source=mixed.source) if behind else mixed
        if token.kind == "number" and left.kind not in ("!", "degree"):
            if is_whole and token.after_space and self._next_is("/") and self._peek(1).kind == "number":
                self._place += 1
                below = self._parse_power()
                return self._make_node(start, "+", left, Node("/", (right, below)))
            raise UnreadableError("two numbers side by side")
        return self._make_node(start, "*", left, right)

    def _starts_factor(self) -> bool:
        token = self._peek()
        if token.kind == "sign":
            return token.text in ("(", "{", "[") or (token.text == "|" and not self._bars and not self._in_builder)
        if token.kind == "command":
            return token.text in FACTORS
        return token.kind in ("number", "begin") or (token.kind == "word" and not self._next_conjunction())

    # --- units ---

    def _parse_unit_words(self, start: int, node: Node) -> Node:
        """The value with the words behind it, up to the end of this part of the answer."""
        first = self._place
        while (token := self._peek()).kind in ("word", "text") and not self._next_conjunction():
            self._place += 1
            if self._consume_if_next("^"):
                self._parse_signed_argument()
            if self._next_is("/", "cdot") and self._peek(1).kind in ("word", "text"):
                self._place += 1
        token = self._peek()
        if (
            token.kind != "end"
            and not self._next_conjunction()
            and token.text not in (*RELATIONS, ",", ";", ")", "]", "}")
        ):
            raise UnreadableError("words within an expression")
        words = self._text[self._tokens[first].start : self._tokens[self._place - 1].end]
        return Node("unit", (node,), unit_name(words), source=node.source)

    # --- powers and what stands behind a value ---

    def _parse_power(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnreadableError("nested too deep")
        start = self._place
        node = self._parse_atom()
        while True:
            if self._consume_if_next("^"):
                node = self._make_node(start, "^", node, self._parse_signed_argument())
            elif self._consume_if_next("!"):
                node = self._make_node(start, "!", node)
            elif self._consume_if_next("%"):
                node = self._make_node(start, "percent", node)
            elif self._consume_if_next("degree"):
                node = self._make_node(start, "degree", node)
                if (scale := self._peek()).kind in ("word", "text") and scale.text in ("C", "F"):
                    self._place += 1
                    node = Node("unit", (node,), f"deg{scale.text}", source=node.source)
            else:
                self._depth -= 1
                return node

    def _parse_signed_argument(self) -> Node:
        start = self._place
        if self._consume_if_next("-"):
            return self._make_node(start, "neg", self._parse_argument())
        return self._parse_argument()

    def _parse_argument(self) -> Node:
        """The argument of a command: a group, or one digit, letter or command."""
        token = self._peek()
        if self._next_is("{"):
            return self._parse_braces()
        is_whole = token.kind == "number" and (self._has_no_latex() or token.text[0] == ".")
        if token.kind in ("number", "word") and len(token.text) > 1 and not is_whole:
            self._split(1)
        return self._parse_atom()

    # --- single things ---

    def _parse_atom(self) -> Node:
        token, start = self._peek(), self._place
        if token.kind == "number":
            self._place += 1
            if self._next_is("_"):
                return self._parse_number_base(start, token.text)
            if len(token.text) > _MAX_DIGITS:
                raise UnreadableError("too many digits")
            return self._make_node(start, "number", value=Fraction(token.text))
        if token.kind == "word":
            return self._parse_word()
        if token.kind == "begin":
            return self._parse_matrix()
        if token.kind == "text" and self._peek(1).text in ("=", "approx"):
            self._place += 1
            return self._make_node(start, "symbol", name=f"text {token.text}")
        if token.kind == "sign":
            return self._parse_bracket()
        if token.kind == "command":
            return self._parse_command()
        raise UnreadableError(token.text or "an end")

    def _parse_word(self) -> Node:
        token, start = self._peek(), self._place
        name = token.text
        if name in ("abs", "floor", "ceil", "gcd", "lcm", "max", "min") and self._peek(1).text == "(":
            self._place += 1
            return self._parse_function_application(start, name)
        if len(name) > 1 and not name.isupper():
            if len(name) > _MAX_PRODUCT:
                raise UnreadableError(f"the word {name}")
            self._split(1)
            return self._parse_atom()
        self._place += 1
        return self._parse_subscripts(start, name)

    def _parse_command(self) -> Node:
        token, start = self._peek(), self._place
        self._place += 1
        match token.text:
            case "frac":
                return self._make_node(start, "/", self._parse_argument(), self._parse_argument())
            case "sqrt":
                return self._parse_function_application(start, "sqrt")
            case "binom" | "dbinom" | "tbinom":
                return self._make_node(start, "binom", self._parse_argument(), self._parse_argument())
            case "pi":
                return self._make_node(start, "symbol", name="pi")
            case "infty":
                return self._make_node(start, "symbol", name="oo")
            case "emptyset" | "varnothing":
                return self._make_node(start, "group", name="{}")
            case "mathbb" | "R":
                name = self._parse_subscript_text() if token.text == "mathbb" else "R"
                return self._make_node(start, "symbol", name=f"set {name}")
            case "{" | "langle" | "lfloor" | "lceil" | "lvert" | "|":
                self._place = start
                return self._parse_bracket()
        if token.text in FUNCTIONS:
            return self._parse_function_application(start, token.text)
        if token.text in ACCENTS:
            return self._make_node(start, "symbol", name=f"{token.text} {self._parse_subscript_text()}")
        if token.text in GREEK:
            return self._parse_subscripts(start, token.text)
        if token.text in FIGURES and self._peek().kind == "word":
            self._place += 1
            return self._make_node(start, "symbol", name=f"{token.text} {self._tokens[start + 1].text}")
        raise UnreadableError(f"\\{token.text}")

    def _parse_function_application(self, start: int, name: str) -> Node:
        """A function with its argument, which without brackets is the product behind it."""
        parts, exponent = list[Node](), None
        if name == "sqrt" and self._consume_if_next("["):
            parts.append(self._parse_sum())
            self._expect("]")
        if name == "log" and self._consume_if_next("_"):
            parts.append(self._parse_argument())
        if name != "sqrt" and self._consume_if_next("^"):
            exponent = self._parse_signed_argument()
        if name == "sqrt" and not self._next_is("("):
            parts.insert(0, self._parse_argument())
        elif self._next_is("(", "{", "["):
            group = self._parse_bracket() if not self._next_is("{") else self._parse_braces()
            parts[:0] = group.parts if group.kind == "group" else [group]
        else:
            parts.insert(0, self._parse_bare_argument())
        is_inverse = exponent is not None and exponent.kind == "neg" and exponent.source.replace(" ", "") == "-1"
        if is_inverse and name in ("sin", "cos", "tan"):
            return self._make_node(start, f"arc{name}", *parts)
        node = self._make_node(start, name, *parts)
        return node if exponent is None else self._make_node(start, "^", node, exponent)

    def _parse_bare_argument(self) -> Node:
        start = self._place
        node = self._parse_power()
        while (
            self._starts_factor()
            and not self._starts_unit()
            and not self._next_is(*FUNCTIONS)
            and not self._next_is("(")
        ):
            node = self._parse_juxtaposed_product(start, node)
        return node

    # --- brackets ---

    def _parse_braces(self) -> Node:
        """A group of LaTeX, which has no meaning of its own, but that of a set where it holds a list."""
        start = self._place
        self._expect("{")
        if self._consume_if_next("}"):
            return self._make_node(start, "group", name="{}")
        node = self._parse_list()
        if self._consume_if_next("choose"):
            node = self._make_node(start, "binom", node, self._parse_list())
        elif self._consume_if_next("over"):
            node = self._make_node(start, "/", node, self._parse_list())
        self._expect("}")
        is_set = node.kind == "group" and not node.name
        return self._make_node(start, "group", *node.parts, name="{}") if is_set else node

    def _parse_bracket(self) -> Node:
        start, token = self._place, self._peek()
        if token.kind == "sign" and token.text == "{":
            return self._parse_braces()
        self._place += 1
        if token.text in ("|", "lvert"):
            return self._parse_absolute_value(start, "|" if token.text == "|" else "rvert")
        if token.text not in CLOSING:
            raise UnreadableError(token.text)
        if token.text in ("lfloor", "lceil"):
            node = self._parse_sum()
            self._expect(CLOSING[token.text])
            return self._make_node(start, "floor" if token.text == "lfloor" else "ceil", node)
        return self._parse_bracket_content(start, token.text)

    def _parse_absolute_value(self, start: int, right: str) -> Node:
        self._bars += 1
        node = self._parse_sum()
        self._expect(right)
        self._bars -= 1
        return self._make_node(start, "abs", node)

    def _parse_bracket_content(self, start: int, left: str) -> Node:
        """The content of brackets: a list, one value, or a set by its condition."""
        wanted = ("]", ")") if left in ("(", "[") else (CLOSING[left],)
        bars, self._bars = self._bars, 0
        if self._next_is(*wanted):
            inner = Node("group")
        elif left == "{":
            inner = self._parse_set_content()
        else:
            inner = self._parse_list()
        self._bars = bars
        right = self._peek().text
        if not self._consume_if_next(*wanted):
            raise UnreadableError(f"no {wanted[0]}")
        if inner.kind == "builder":
            return inner
        name = {"langle": "()"}.get(left, left + right)
        is_list = inner.kind == "group" and not inner.name
        if is_list:
            return self._make_node(start, "group", *inner.parts, name=name)
        if left == "{" or name in ("(]", "[)"):
            return self._make_node(start, "group", inner, name=name)
        return Node(inner.kind, inner.parts, inner.name, inner.value, self._make_node(start, "").source)

    def _parse_set_content(self) -> Node:
        start = self._place
        self._in_builder = True
        first = self._parse_relation()
        self._in_builder = False
        if self._consume_if_next("|", ":", "mid"):
            return self._make_node(start, "builder", first, self._parse_list())
        self._place = start
        return self._parse_list()

    def _parse_matrix(self) -> Node:
        start, name = self._place, self._peek().text
        if name not in ("pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix"):
            raise UnreadableError(name)
        self._place += 1
        rows, cells = list[Node](), [self._parse_relation()]
        while True:
            token = self._peek()
            self._place += 1
            if token.text == "&":
                cells.append(self._parse_relation())
            elif token.kind == "row" or (token.kind, token.text) == ("end", name):
                rows.append(Node("row", tuple(cells)))
                if token.kind == "row" and (self._peek().kind, self._peek().text) == ("end", name):
                    token = self._peek()
                    self._place += 1
                if token.kind == "end":
                    return self._make_node(start, "matrix", *rows)
                cells = [self._parse_relation()]
            else:
                raise UnreadableError(token.text)


def _are_integers(parts: tuple[Node, ...]) -> bool:
    return all(part.kind == "number" and part.value.denominator == 1 for part in parts)
