"""The rollout engine: requests in, finished responses out, one round of all live sequences a ``step``.

A response depends on the weights and its key alone. Speculation, batch, rank count and the moment a strategy
changes decide how fast it comes, never what it says. Knows no MPI, no reward and no training.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.ngram import NgramDrafter
from tlt_hpc.records import FinishReason, Request, Rollout
from tlt_hpc.rollout.drafts import LearnedDrafts, NgramDrafts
from tlt_hpc.rollout.guard import TieGuard
from tlt_hpc.rollout.kv_cache import KVCache
from tlt_hpc.rollout.noise import NoiseWindow
from tlt_hpc.rollout.rows import LiveRows
from tlt_hpc.rollout.sampling import SamplingRule, choose, token_log_probs
from tlt_hpc.rollout.strategy import OFF, Strategy, StrategyChooser
from tlt_hpc.rollout.verify import emitted_counts, num_matching

# sink(tokens [T] int32, prompt length, features [T - 1, 1, H] as bf16 bits): what a finished response leaves
FeatureSink = Callable[[NDArray[np.int32], int, NDArray[np.uint16]], None]

_PREFILL_TOKENS = 4096


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is built for."""

    rule: SamplingRule
    eos_token_ids: tuple[int, ...]
    max_live: int
    max_prompt_tokens: int
    max_new_tokens: int
    tie_guard: bool
    sharpness: float = 1.0
    ngram_orders: tuple[int, ...] = (10, 8, 6, 4, 3)
    ngram_history_tokens: int = 200_000
    strategies: tuple[Strategy, ...] = (OFF,)
    epsilon: float = 0.05
    window: int = 128
    seed: int = 0


@dataclass
class EngineCounts:
    """What the engine has done since its counts were last taken."""

    num_tokens: int = 0
    num_row_passes: int = 0
    """Sum over rounds of the sequences in them: tokens over this is the accept length."""
    num_guarded: int = 0
    strategies: dict[str, tuple[int, int]] = field(default_factory=dict)


class RolloutEngine:
    """Continuous batching over rows, with speculation that cannot change the text."""

    def __init__(self, decoder: Decoder, settings: EngineSettings, drafter: Drafter | None = None) -> None:
        self.decoder, self.settings = decoder, settings
        deepest = max(strategy.depth for strategy in settings.strategies)
        # room for a full draft beyond the last token, and one spare position that no sequence reaches
        positions = settings.max_prompt_tokens + settings.max_new_tokens + deepest + 2
        shape, device = decoder.shape, decoder.device
        self._rows = LiveRows(settings.max_live, positions, shape.hidden_size if drafter else 0, decoder.dtype, device)
        self._cache = KVCache(shape, settings.max_live, positions, decoder.dtype, device)
        self._noise = NoiseWindow(settings.max_live, settings.rule.num_tokens, deepest + 1, device)
        self._guard = TieGuard(decoder, settings.rule, settings.tie_guard)
        self._table = NgramDrafter(settings.ngram_orders, settings.ngram_history_tokens)
        self._ngram = NgramDrafts(self._table, settings.rule, settings.sharpness)
        self._learned = (
            LearnedDrafts(drafter, decoder, settings.rule, settings.sharpness, settings.max_live, positions)
            if drafter
            else None
        )
        self._uses_ngram = any(strategy.source == "ngram" for strategy in settings.strategies)
        self.chooser = StrategyChooser(settings.strategies, settings.epsilon, settings.window, settings.seed)
        self._eos = torch.tensor(settings.eos_token_ids, dtype=torch.int64, device=device)
        self._waiting: deque[Request] = deque()
        self._finished: list[Rollout] = []
        self._longest: Tensor | None = None
        self._counts = EngineCounts()
        self._totals_taken = self.chooser.totals()
        self.drafter_ready = False
        """Whether the drafter has ever been trained; an untrained one is not worth trying."""
        self.feature_sink: FeatureSink | None = None

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests.

        Raises:
            ValueError: a prompt is empty or longer than the engine was built for.
        """
        for request in requests:
            if not 0 < len(request.prompt_tokens) <= self.settings.max_prompt_tokens:
                raise ValueError(
                    f"prompt of draw {request.key.draw} has {len(request.prompt_tokens)} tokens; the engine takes 1 to "
                    f"{self.settings.max_prompt_tokens}: raise data.max_prompt_tokens or drop the prompt"
                )
            self._waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self._rows.num_live > 0

    @property
    def has_waiting(self) -> bool:
        """Whether the next step may prefill."""
        return bool(self._waiting)

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + self._rows.num_live

    @property
    def num_tokens(self) -> int:
        """Response tokens since the counts were last taken."""
        return self._counts.num_tokens

    def collect(self) -> list[Rollout]:
        """The finished responses in the order of their keys; the engine forgets them."""
        finished, self._finished = sorted(self._finished, key=lambda rollout: rollout.key), []
        return finished

    def abort(self) -> None:
        """Drop everything that has not finished."""
        self._waiting.clear()
        while self._rows.num_live:
            self._rows.remove(self._rows.num_live - 1)

    def take_counts(self) -> EngineCounts:
        """The counts since the last call; starts new ones."""
        counts, self._counts = self._counts, EngineCounts()
        counts.num_guarded, self._guard.num_guarded = self._guard.num_guarded, 0
        totals = self.chooser.totals()
        before = self._totals_taken
        counts.strategies = {name: (r - before[name][0], t - before[name][1]) for name, (r, t) in totals.items()}
        self._totals_taken = totals
        return counts

    # -- weights ------------------------------------------------------------------------------------------------

    def load_policy(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """New weights in place, then the tie guard's tolerance measured anew on them.

        Only between rollouts: keys and values of live sequences would belong to the old weights.
        """
        assert self._rows.num_live == 0, "weights change only between rollouts"
        self.decoder.load(weights, version)
        if self.settings.tie_guard and self._longest is not None:
            self._guard.probe(self._longest)

    def calibrate(self, requests: Sequence[Request]) -> None:
        """Measure the tie guard's tolerance on real text before the first rollout, by responses that are thrown away.

        The requests' keys must be none of a rollout's; nothing is learned from their responses.

        Random tokens would not do: far from what a model was trained on its activations, and the error, are larger.
        """
        assert not self.has_work and self._longest is None
        if not self.settings.tie_guard:
            return
        uses_ngram, self._uses_ngram, self._guard.active = self._uses_ngram, False, False
        self.submit(requests)
        while self.has_work:
            self._admit()
            self._retire(self._round(OFF)[1])
        self._finished = []
        self._uses_ngram, self._guard.active = uses_ngram, True
        assert self._longest is not None, "calibrate needs requests"
        self._guard.probe(self._longest)

    # -- rounds -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Admit what fits, decode one round, retire what finished."""
        self._admit()
        start = time.perf_counter()
        num_live = self._rows.num_live
        strategy = self.chooser.choose(num_live, self._usable())
        emitted, ended = self._round(strategy)
        self.chooser.observe(strategy, num_live, sum(emitted), time.perf_counter() - start)
        self._counts.num_tokens += sum(emitted)
        self._counts.num_row_passes += num_live
        self._retire(ended)

    def _usable(self) -> Sequence[Strategy]:
        if self._learned is not None and not self.drafter_ready:
            return [strategy for strategy in self.chooser.strategies if strategy.source != "drafter"]
        return self.chooser.strategies

    def _round(self, strategy: Strategy) -> tuple[list[int], list[bool]]:
        """Draft, verify, accept: returns the tokens emitted and whether an end token came, for each live row."""
        rows, num_live = self._rows, self._rows.num_live
        lengths = rows.lengths[:num_live]
        noise = self._noise.at(lengths - rows.prompt_lengths[:num_live], strategy.depth + 1)
        drafts = self._draft(strategy, noise)
        width = drafts.shape[1] + 1
        last = rows.tokens[rows.index[:num_live], lengths - 1].unsqueeze(1)
        fed = torch.cat([last, drafts.clamp(min=0)], 1)
        positions = (lengths - 1).unsqueeze(1) + torch.arange(width, device=fed.device)
        hidden = self.decoder.hidden(fed.flatten(), positions.flatten(), self._cache.attend(positions))
        logits = self.decoder.logits(hidden).view(num_live, width, -1)
        chosen, counts, ended = self._accept(logits, noise[:, :width], drafts)
        log_probs = token_log_probs(logits, chosen, self.settings.rule.temperature)
        rows.commit(chosen, counts, log_probs, hidden.view(num_live, width, -1))
        emitted = counts.tolist()
        rows.extend_texts(chosen.tolist(), emitted)
        return emitted, ended.tolist()

    def _draft(self, strategy: Strategy, noise: Tensor) -> Tensor:
        """Drafts [B, k] of a strategy; -1 where there is none, k the longest proposal (0: plain decoding)."""
        rows, num_live = self._rows, self._rows.num_live
        if strategy.source == "drafter":
            assert self._learned is not None and rows.features is not None
            return self._learned.propose(rows.tokens, rows.features, rows.lengths[:num_live], noise, strategy.depth)
        if strategy.source == "ngram":
            self._learn_live()
            proposals = self._ngram.propose(rows.texts, noise, strategy.depth)
            width = max(map(len, proposals))
            padded = [proposal + [-1] * (width - len(proposal)) for proposal in proposals]
            return torch.tensor(padded, dtype=torch.int64, device=noise.device).view(num_live, width)
        return torch.empty(num_live, 0, dtype=torch.int64, device=noise.device)

    def _accept(self, logits: Tensor, noise: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The target's own choices [B, n], how many of them a row emits [B], and whether it ends there [B]."""
        rows, num_live = self._rows, self._rows.num_live
        tolerance = self._guard.tolerance
        choice = choose(logits, noise, self.settings.rule, tolerance)
        chosen, doubtful = choice.token, choice.doubtful
        decided = torch.zeros_like(doubtful)
        end = rows.prompt_lengths[:num_live] + self.settings.max_new_tokens
        room = end - rows.lengths[:num_live]
        columns = torch.arange(chosen.shape[1], device=chosen.device)
        while True:
            counts, ended = emitted_counts(chosen, num_matching(chosen, drafts), room, self._eos)
            if not self._guard.active:
                return chosen, counts, ended
            open_ties = doubtful & (columns < counts.unsqueeze(1))
            if not bool(open_ties.any()):
                return chosen, counts, ended
            # one tie a row at a time: its verdict decides which later positions are reached at all
            for row in open_ties.any(1).nonzero().flatten().tolist():
                column = int(open_ties[row].long().argmax())
                prefix = torch.cat([rows.tokens[row, : rows.lengths[row]], drafts[row, :column]])
                chosen[row, column] = self._guard.decide(prefix, noise[row, column], logits[row, column])
                decided[row, column] = True
            if self._guard.tolerance > tolerance:
                tolerance = self._guard.tolerance
                doubtful = choose(logits, noise, self.settings.rule, tolerance).doubtful
            doubtful = doubtful & ~decided

    # -- rows ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        free = self._rows.capacity - self._rows.num_live
        requests = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        if not requests:
            return
        first = self._rows.add(requests)
        new_rows = list(range(first, self._rows.num_live))
        self._noise.set_rows(new_rows, [request.key for request in requests])
        if self._learned is not None:
            self._learned.set_rows(new_rows)
        self._prefill(first)

    def _prefill(self, first: int) -> None:
        """Keys, values and features of all prompt tokens but the last, which the first round feeds."""
        rows = self._rows
        width = int(rows.prompt_lengths[first : rows.num_live].max()) - 1
        chunk = max(1, _PREFILL_TOKENS // (rows.num_live - first))
        for start in range(0, width, chunk):
            end = min(width, start + chunk)
            tokens = rows.tokens[first : rows.num_live, start:end]
            positions = torch.arange(start, end, device=tokens.device).expand(tokens.shape)
            hidden = self.decoder.hidden(
                tokens.flatten(), positions.flatten(), self._cache.attend(positions, first_row=first)
            )
            if rows.features is not None:
                rows.features[first : rows.num_live, start:end] = hidden.view(*tokens.shape, -1)

    def _retire(self, ended: list[bool]) -> None:
        rows = self._rows
        for row in reversed(range(rows.num_live)):
            num_response = len(rows.texts[row]) - len(rows.requests[row].prompt_tokens)
            if ended[row] or num_response >= self.settings.max_new_tokens:
                self._finish(row, FinishReason.EOS if ended[row] else FinishReason.LENGTH)
                moved = rows.remove(row)
                if moved is not None:
                    self._noise.move_row(moved, row)
                    self._cache.move_row(moved, row, int(rows.lengths[row]))
                    if self._learned is not None:
                        self._learned.move_row(moved, row, int(rows.lengths[row]))

    def _finish(self, row: int, reason: FinishReason) -> None:
        rows, request = self._rows, self._rows.requests[row]
        tokens = np.array(rows.texts[row], dtype=np.int32)
        start, end = len(request.prompt_tokens), len(tokens)
        self._finished.append(
            Rollout(
                key=request.key,
                prompt_tokens=request.prompt_tokens,
                response_tokens=tokens[start:],
                log_probs=rows.log_probs[row, start:end].cpu().numpy().copy(),
                finish_reason=reason,
                weight_version=self.decoder.version,
                num_target_passes=rows.num_passes[row],
                finished_seconds=time.time(),
            )
        )
        if self._uses_ngram:
            self._table.learn(rows.texts[row], rows.learned[row])
        if self._longest is None or end > len(self._longest):
            self._longest = rows.tokens[row, :end].clone()
        if self.feature_sink is not None and rows.features is not None:
            features = rows.features[row, : end - 1].to(torch.bfloat16).view(torch.uint16).cpu().numpy()
            self.feature_sink(tokens, start, features[:, None].copy())

    def _learn_live(self) -> None:
        rows = self._rows
        for row, text in enumerate(rows.texts):
            if rows.learned[row] < len(text):
                self._table.learn(text, rows.learned[row])
                rows.learned[row] = len(text)
