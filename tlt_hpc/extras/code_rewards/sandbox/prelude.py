"""The names that programs have without an import, as LeetCode, LiveCodeBench and verl give them.

They are added to Python's own names, so a program's names come first, its lines keep their numbers, and none of these
counts as a function that the program defines.
"""

from __future__ import annotations

import builtins
import functools
import sys
from typing import Any

_IMPORTS = """
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from fractions import Fraction
from decimal import Decimal, getcontext
from io import *
from json import *
from typing import *
import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, functools
import operator, io, sys, json, time, os, fractions, decimal, typing
"""
_RECURSION = 50_000
"""As in LiveCodeBench: the usual 1,000 end searches of trees that are right."""


@functools.cache
def prelude_names() -> dict[str, Any]:
    """The names, but those of ``sys``."""
    names: dict[str, Any] = {}
    exec(_IMPORTS, names)
    return {name: value for name, value in names.items() if not hasattr(builtins, name) and name[0] != "_"}


def install_prelude_names() -> None:
    """Add the names in this process, which is a program's; those of ``sys`` as they are now."""
    of_sys = {name: value for name, value in vars(sys).items() if name[0] != "_" and not hasattr(builtins, name)}
    numpy = {"np": sys.modules["numpy"]} if "numpy" in sys.modules else {}
    vars(builtins).update(of_sys | prelude_names() | numpy)
    sys.setrecursionlimit(_RECURSION)
