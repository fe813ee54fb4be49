"""The one sampling rule, with its zones of doubt: which token wins, and whether rounding could have changed that.

Used alike with and without speculation, for every position of a draft, and in float64 by the tie guard.
Shapes: ``V`` vocabulary; leading dimensions are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingRule:
    """Temperature and the two truncations; ``num_tokens`` is the vocabulary without its padding rows."""

    temperature: float
    num_tokens: int
    top_k: int = 0
    top_p: float = 1.0

    @property
    def truncates(self) -> bool:
        """True if top-k or top-p leaves tokens out."""
        return self.top_k > 0 or self.top_p < 1.0


@dataclass(frozen=True)
class Choice:
    """The winning token [...] and whether another path's rounding could choose otherwise [...]."""

    token: Tensor
    doubtful: Tensor


_CHUNK = 128
_WIDE = 4096
"""Vocabularies from this size on are searched in two stages."""


def top_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` best values and indices [..., count] of scores [..., V], best first.

    Over a wide vocabulary torch.topk walks every element; the maxima of chunks say where to look, eight times faster.
    """
    width = scores.shape[-1]
    if width < _WIDE and count == 1:
        highest = scores.max(-1, keepdim=True)
        return highest.values, highest.indices
    if width < _WIDE:
        best = scores.topk(count, -1)
        return best.values, best.indices
    if width % _CHUNK:
        scores = torch.nn.functional.pad(scores, (0, -width % _CHUNK), value=-torch.inf)
    chunks = scores.reshape(*scores.shape[:-1], -1, _CHUNK)
    where = chunks.amax(-1).topk(count, -1).indices
    held = chunks.gather(-2, where.unsqueeze(-1).expand(*where.shape, _CHUNK)).flatten(-2)
    best = held.topk(count, -1)
    chunk = where.gather(-1, best.indices // _CHUNK)
    return best.values, chunk * _CHUNK + best.indices % _CHUNK


def choose_tokens(logits: Tensor, noise: Tensor, rule: SamplingRule, tolerance: float) -> Choice:
    """Gumbel-max over the tokens that the truncations keep; temperature 0 is argmax.

    Args:
        logits: [..., V], any float precision.
        noise: [..., V] standard Gumbel noise; not read at temperature 0.
        tolerance: zone of doubt, in units of the perturbed score (logits over temperature, plus noise).
    """
    scaled = logits[..., : rule.num_tokens]
    if rule.temperature > 0:
        scaled = scaled if rule.temperature == 1.0 else scaled / rule.temperature
        scores = scaled + noise[..., : rule.num_tokens]
    else:
        scores = scaled
    if not rule.truncates:
        values, indices = top_scores(scores, min(2, rule.num_tokens))
        return Choice(indices[..., 0], values[..., 0] - values[..., -1] < tolerance)
    surely, perhaps = kept_token_masks(scaled, rule, tolerance)
    values, indices = top_scores(scores.masked_fill(~perhaps, -torch.inf), min(2, rule.num_tokens))
    token = indices[..., 0]
    edge = ~surely.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    return Choice(token, edge | (values[..., 0] - values[..., -1] < tolerance))


def choose_tokens_by_rule(
    logits: Tensor,
    noise: Tensor,
    rules: Sequence[SamplingRule],
    rows: Tensor,
    tolerance: Callable[[SamplingRule], float],
) -> Choice:
    """``choose_tokens`` for logits [T, V] of rows [T] that have ``rules`` of their own, each with its zone of doubt."""
    distinct = dict.fromkeys(rules)
    if len(distinct) == 1:
        return choose_tokens(logits, noise, rules[0], tolerance(rules[0]))
    token, doubtful = torch.empty_like(rows), torch.empty_like(rows, dtype=torch.bool)
    for rule in distinct:
        has_rule = torch.tensor([other == rule for other in rules], device=rows.device)
        at = has_rule[rows].nonzero().flatten()
        choice = choose_tokens(logits[at], noise[at], rule, tolerance(rule))
        token[at], doubtful[at] = choice.token, choice.doubtful
    return Choice(token, doubtful)


def kept_token_masks(scaled: Tensor, rule: SamplingRule, tolerance: float) -> tuple[Tensor, Tensor]:
    """Masks [..., V] of the tokens that the truncations surely keep, and that they keep perhaps.

    Each truncation reads the full distribution. With ``tolerance`` 0 both masks agree up to exact ties. A nucleus
    keeps the tokens before which less than ``top_p`` of the mass lies; an error of e in all scaled logits moves a mass
    m by at most 2 e m (1 - m) to first order, so ``tolerance`` bounds the error in mass as well.
    """
    surely, perhaps = torch.ones_like(scaled, dtype=torch.bool), torch.ones_like(scaled, dtype=torch.bool)
    if 0 < rule.top_k < rule.num_tokens:
        edge = scaled.topk(rule.top_k + 1, -1).values
        surely &= scaled > edge[..., -1:] + tolerance
        perhaps &= scaled >= edge[..., -2:-1] - tolerance
    if rule.top_p < 1.0:
        ranked = scaled.sort(-1, descending=True)
        mass = torch.softmax(ranked.values, -1).cumsum(-1)
        before = torch.nn.functional.pad(mass, (1, 0))
        at_least = before.gather(-1, _num_above(ranked.values, scaled, tolerance))
        own = torch.softmax(scaled, -1)
        at_most = before.gather(-1, _num_above(ranked.values, scaled, -tolerance)) - own if tolerance > 0 else at_least
        surely &= at_most < rule.top_p - tolerance
        perhaps &= at_least < rule.top_p + tolerance
    return surely, perhaps


def lowest_kept_scores(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least number [R, 1] that a token of ``scaled`` [R, V] must have to be kept by its row's truncations [R] each.

    ``kept_token_masks`` without a zone of doubt, for rules that stand in tensors: nothing is read back.
    """
    width = scaled.shape[1]
    ranked = scaled.sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k, width).clamp(max=width) - 1
    # in float64, so that the library's way of adding does not decide
    mass = ranked.double().softmax(-1)
    num_kept = (mass.cumsum(-1) - mass < top_p.unsqueeze(1)).sum(1).clamp(min=1)
    return ranked.gather(1, torch.minimum(last, num_kept - 1).unsqueeze(1))


def _num_above(descending: Tensor, values: Tensor, margin: float) -> Tensor:
    """Numbers [..., V] of ``descending`` [..., V] that exceed each of ``values`` [..., V] by more than ``margin``."""
    ascending = -descending
    return torch.searchsorted(ascending.contiguous(), -(values + margin).contiguous())


def token_log_probs(logits: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor:
    """Log-probabilities of tokens [...] under the temperature-scaled policy [..., V], before any truncation.

    ``temperatures`` broadcast against the logits; 0 is taken as 1.
    """
    scaled = logits / torch.where(temperatures > 0, temperatures, 1.0)
    return scaled.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
