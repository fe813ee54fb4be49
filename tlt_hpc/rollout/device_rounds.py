"""Rounds on a device without a wait: drafts and verification as static functions of device buffers, replayed as graphs.

A round is two graphs at most: the drafter's steps, by batch bucket and strategy, and the target's pass with sampling,
walk and commitment, by batch bucket and width, which strategies of one width share. The next round is launched before
the host has read this one: a row that has ended emits nothing more, so that what the host learns late changes nothing.
On a CPU the same functions run eagerly, for tests; they have not run on a GPU yet.
Shapes: as in ``decoding``; ``B`` is a bucket, rows beyond the live ones are padding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from tlt_hpc.kernels.attention import MAX_NODES
from tlt_hpc.kernels.graphs import GraphPool
from tlt_hpc.kernels.gumbel import GumbelChoice, gumbel_argmax
from tlt_hpc.rollout.decoding import Emitted, Pending, Rounds, append, by_node, learn_chances
from tlt_hpc.rollout.drafts import NoiseAt, Perturbation, hybrid, slots_needed
from tlt_hpc.rollout.kv_cache import Layout
from tlt_hpc.rollout.noise import gumbel_number, noise_key
from tlt_hpc.rollout.sequences import Sequence as Response
from tlt_hpc.rollout.strategy import OFF, Strategy
from tlt_hpc.rollout.transfer import upload
from tlt_hpc.rollout.tree import EMPTY, DraftTree, tree

logger = logging.getLogger(__name__)

_BUCKETS = (1, 2, 4, 8)
_BUCKET_STEP = 16


def batch_buckets(most: int) -> list[int]:
    """Batch sizes that graphs are made for: powers of two, from 16 on multiples of it, and ``most`` itself."""
    sizes = [size for size in (*_BUCKETS, *range(_BUCKET_STEP, most, _BUCKET_STEP)) if size < most]
    return [*sizes, most]


@dataclass
class DeviceRounds(Rounds):
    """Rounds whose tensors stay on the device; those that graphs cannot hold are carried out as on the host.

    These are rounds with a truncated rule (top-k, top-p, min-p) or a least length still to reach in any row, and trees
    of more than 64 nodes. With the tie guard on, and with n-grams, a round is read before the next one starts.
    """

    strategies: tuple[Strategy, ...] = (OFF,)

    def __post_init__(self) -> None:
        rows = self.residents.rows
        self._buckets = batch_buckets(rows.capacity)
        self._read_width = 1 + max(strategy.depth for strategy in self.strategies)
        self._layout = Layout(self.residents.cache.tables.shape[1])
        self._ahead: list[_Round] = []
        self._graphs, self._ends = GraphPool(self.decoder.device), rows.ends
        self._tolerance = torch.zeros(1, device=self.decoder.device)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all graphs now, the largest first, instead of each on its first use."""
        start = time.perf_counter()
        for count in reversed(self._buckets):
            for strategy in sorted(self.strategies, key=lambda one: -one.widest_pass):
                if self._fits_graphs(strategy):
                    if strategy.has_drafter:
                        self._run_draft(count, strategy)
                    form = _Form.of(strategy)
                    tokens = torch.zeros(count, form.width, dtype=torch.int64, device=self.decoder.device)
                    self._run_verify(DraftTree(tokens, torch.zeros_like(tokens) if form.is_tree else None))
        shared, apart = self.graph_bytes, self._bytes_apart()
        logger.info(
            "%d graphs in %.1f s: %d MiB of device memory; with a target graph for each strategy %d MiB",
            len(self._graphs), time.perf_counter() - start, shared >> 20, apart >> 20,
        )  # fmt: skip

    @property
    def graph_bytes(self) -> int:
        return sum(size for _, size in self._graphs.memory_table())

    def _bytes_apart(self) -> int:
        """What the graphs would take if strategies of one width did not share the target's."""
        size = dict(self._graphs.memory_table())
        forms = [_Form.of(strategy) for strategy in self.strategies if self._fits_graphs(strategy)]
        targets = sum(size.get(("verify", count, form), 0) for count in self._buckets for form in forms)
        return targets + sum(held for key, held in size.items() if isinstance(key, tuple) and key[0] == "draft")

    # -- which rounds -------------------------------------------------------------------------------------------

    def overlaps(self, strategy: Strategy) -> bool:
        return not self.guard.active and strategy.source in ("off", "drafter") and self._is_static(strategy)

    def _is_static(self, strategy: Strategy) -> bool:
        return self._fits_graphs(strategy) and not any(map(_is_special, self.residents.rows.sequences))

    @staticmethod
    def _fits_graphs(strategy: Strategy) -> bool:
        return slots_needed(strategy) <= MAX_NODES

    # -- a round ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, strategy: Strategy) -> Pending:
        """Draft, verify, accept, commit, all of it queued on the device."""
        if not self._is_static(strategy):
            assert not self._ahead, "a round on the host needs the texts"
            return super().launch(strategy)
        rows = self.residents.rows
        self._tolerance.fill_(self.guard.logit_tolerance if self.guard.active else 0.0)
        watch = _Stopwatch(self.decoder.device)
        drafts, cells, faults = self._drafts(strategy)
        watch.mark()
        before = (rows.lengths.clone(), rows.caps.clone()) if self.guard.active else None
        packed, log_probs, on_path = self._run_verify(drafts)
        live = slice(rows.num_live)
        told, log_probs = _to_host(packed[live]), _to_host(log_probs[live])
        drafts = _rows_of(drafts, live)
        if cells is not None and self.learned is not None:
            learn_chances(self.learned, drafts, cells[live], on_path[live])
        watch.mark()
        sequences = list(rows.sequences)
        started = _Round(self, strategy, sequences, watch, drafts, told, log_probs, faults, before)
        self._ahead.append(started)
        return started

    def _drafts(self, strategy: Strategy) -> tuple[DraftTree, Tensor | None, Tensor | None]:
        """The bucket's drafts, the cells of their chances, and which rows' drafter failed [B] on the host."""
        rows = self.residents.rows
        count = self._bucket()
        if strategy == OFF:
            return DraftTree(rows.last_tokens(count).unsqueeze(1)), None, None
        if strategy.source == "ngram":
            return self._ngram_drafts(count, strategy), None, None
        drafts, cells, faults = self._learned_drafts(count, strategy)
        # the target's graph may use the memory of the drafter's outputs
        cells = None if cells is None else cells.clone()
        faults = _to_host(faults[: rows.num_live])
        if strategy.source == "hybrid":
            drafts = self._grafted(drafts, strategy)
        return drafts, cells, faults

    # -- draft --------------------------------------------------------------------------------------------------

    def _learned_drafts(self, count: int, strategy: Strategy) -> tuple[DraftTree, Tensor | None, Tensor]:
        assert self.learned is not None, f"strategy {strategy.name} without a drafter"
        rows = self.residents.rows
        ahead = sum(one.most_tokens for one in self._ahead)
        unread = max(len(sequence.text) + ahead - 1 - sequence.num_read for sequence in rows.sequences)
        if unread > self._read_width:
            self.learned.read(rows, rows.num_live, self._layout, unread)
        for sequence in rows.sequences:  # what is ahead is told when it is read
            sequence.num_read = len(sequence.text) - 1
        return self._run_draft(count, strategy)

    def _run_draft(self, count: int, strategy: Strategy) -> tuple[DraftTree, Tensor | None, Tensor]:
        learned = self.learned
        assert learned is not None
        key = "draft", count, replace(strategy, source="drafter")
        tokens, faults, *more = self._pool().run(key, lambda: self._draft(count, strategy), (), (learned.known,))
        if not more:
            return DraftTree(tokens), None, faults
        return DraftTree(tokens, more[0]), more[1], faults

    def _draft(self, count: int, strategy: Strategy) -> tuple[Tensor, ...]:
        """Tokens [B, N], faults [B], and of trees parents [B, N] and cells [B, N]: static."""
        learned, rows = self.learned, self.residents.rows
        assert learned is not None
        feature = learned.read(rows, count, self._layout, self._read_width)
        position = rows.lengths[:count] - rows.starts[:count]
        noise = learned.noise_of(self.noise.words[:count], position)
        how = Perturbation.at(rows.temperatures[:count])
        proposal = learned.draft(rows, self._layout, noise, strategy, how, feature)
        faults = torch.isnan(proposal.scores).any(1)
        drafts = proposal.drafts
        if drafts.parents is None or proposal.cells is None:
            return drafts.tokens, faults
        return drafts.tokens, faults, drafts.parents, proposal.cells

    def _ngram_drafts(self, count: int, strategy: Strategy) -> DraftTree:
        sequences, device = self.residents.rows.sequences, self.decoder.device
        chains = self.ngram.chains(sequences, _noise_on_host(sequences), strategy)
        nodes = [[s.text[-1], *chain] for s, chain in zip(sequences, chains, strict=True)]
        nodes = [row + [EMPTY] * (strategy.widest_pass - len(row)) for row in nodes]
        return DraftTree(upload(nodes + nodes[:1] * (count - len(nodes)), device))

    def _grafted(self, drafts: DraftTree, strategy: Strategy) -> DraftTree:
        """Trees with the branches that n-grams know, filled up with empty nodes."""
        sequences, count = self.residents.rows.sequences, len(drafts.tokens)
        live = _rows_of(drafts, slice(len(sequences)))
        grown = hybrid(live, self.ngram.chains(sequences, _noise_on_host(sequences), strategy))
        n = grown.num_nodes
        parents = grown.parents
        if parents is None:
            parents = (torch.arange(n, device=grown.tokens.device) - 1).clamp(min=0).expand(len(sequences), -1)
        tokens = torch.full((count, strategy.widest_pass), EMPTY, device=grown.tokens.device)
        above = torch.zeros_like(tokens)
        tokens[: len(sequences), :n], above[: len(sequences), :n] = grown.tokens, parents
        return DraftTree(tokens, above)

    # -- verify -------------------------------------------------------------------------------------------------

    def _run_verify(self, drafts: DraftTree) -> tuple[Tensor, ...]:
        rows = self.residents.rows
        count, width = drafts.tokens.shape
        inputs = (drafts.tokens,) if drafts.parents is None else (drafts.tokens, drafts.parents)
        key = "verify", count, _Form(width, drafts.parents is not None)
        return self._pool().run(key, self._verify_and_commit, inputs, (rows.lengths, rows.caps))

    def _verify_and_commit(self, tokens: Tensor, parents: Tensor | None = None) -> tuple[Tensor, ...]:
        """One static function of tokens and parents [B, N]: what the host reads [B, N + 4], log-probs [B, N], path."""
        rows = self.residents.rows
        count, n = tokens.shape
        drafts = DraftTree(tokens) if parents is None else tree(tokens, parents, n - 1)
        hidden, logits = self._verify(drafts, self._layout)
        choice = self._choose(drafts, logits)
        verdict = self._walk(drafts, choice.token.view(count, n), n)
        log_prob = self._log_probs(choice, logits).view(count, n).gather(1, verdict.path)
        near = self._near_ties(choice, n, count).view(count, n).gather(1, verdict.path)
        reached = torch.arange(n, device=tokens.device) < verdict.counts.unsqueeze(1)
        self._commit_path(drafts, verdict, hidden)
        # a row that has ended emits nothing in a round that was launched before the host knew
        rows.caps[:count] = torch.where(verdict.ended, rows.lengths[:count], rows.caps[:count])
        told = (verdict.counts, verdict.ended, verdict.on_path.sum(1) - 1, (near & reached).any(1))
        return torch.cat([verdict.chosen, torch.stack(told, 1)], 1), log_prob, verdict.on_path

    def _choose(self, drafts: DraftTree, logits: Tensor) -> GumbelChoice:
        """The target's choice at each node, flat [B * N]."""
        rows = self.residents.rows
        count, n = drafts.tokens.shape
        depths = torch.arange(n, device=logits.device) if drafts.depths is None else drafts.depths
        position = (rows.lengths[:count] - rows.starts[:count]).unsqueeze(1) + depths
        return gumbel_argmax(
            logits.flatten(0, 1),
            rows.temperatures[:count].unsqueeze(1).expand(-1, n).flatten().contiguous(),
            self.noise.words[:count].unsqueeze(1).expand(-1, n, -1).flatten(0, 1).contiguous(),
            position.flatten(),
            self.noise.vocab_size,
        )

    def _log_probs(self, choice: GumbelChoice, logits: Tensor) -> Tensor:
        """Log-probabilities [B * N] of the choices, over all columns of the logits, as ``token_log_probs`` has them."""
        padding = logits.flatten(0, 1)[:, self.noise.vocab_size :]
        if padding.shape[1] == 0:
            return choice.scaled_logit - choice.log_normaliser
        scaled = padding / self._divisors(logits.shape[1], len(logits)).unsqueeze(1)
        return choice.scaled_logit - torch.logaddexp(choice.log_normaliser, scaled.logsumexp(1))

    def _near_ties(self, choice: GumbelChoice, n: int, count: int) -> Tensor:
        """Which choices [B * n] the tie guard must decide; the tolerance is in logits, the gap over the temperature."""
        return (choice.best - choice.second) * self._divisors(n, count) < self._tolerance

    def _divisors(self, n: int, count: int) -> Tensor:
        """Temperatures [B * n] of nodes; 1 for greedy rows."""
        temperatures = self.residents.rows.temperatures[:count]
        return torch.where(temperatures > 0, temperatures, 1.0).unsqueeze(1).expand(-1, n).flatten()

    # -- read ---------------------------------------------------------------------------------------------------

    def read(self, started: _Round) -> Emitted:
        """Take in what a launched round gave, the oldest first."""
        assert self._ahead[0] is started, "rounds are read in the order of their launch"
        self._ahead.pop(0)
        seconds = started.watch.wait()
        self.seconds.draft += seconds[0]
        self.seconds.verify += seconds[1]
        is_faulty = started.faults is not None and bool(started.faults.any())
        if is_faulty:
            self.report_fault("the drafter's scores are not numbers")
        told = started.told.tolist()
        if started.before is not None and any(row[-1] for row in told):
            tokens, ended, accepted = self._decide_again(started)
        else:
            tokens, ended, accepted = self._take(started, told)
        for later in self._ahead:
            if later.strategy.has_drafter:  # it began where this one ended
                for sequence in started.sequences:
                    sequence.num_read = len(sequence.text) - 1
        return Emitted(started.strategy, started.sequences, tokens, ended, accepted, sum(seconds), is_faulty)

    def _take(self, started: _Round, told: list[list[int]]) -> tuple[list[list[int]], list[bool], list[int]]:
        rows, log_probs = self.residents.rows, started.log_probs
        tokens, ended, accepted = list[list[int]](), list[bool](), list[int]()
        for i, (sequence, row) in enumerate(zip(started.sequences, told, strict=True)):
            count, is_end, num_accepted, _ = row[-4:]
            here = sequence.row >= 0 and sequence.stay == started.stays[i] and count > 0
            tokens.append(row[:count] if here else [])
            ended.append(here and bool(is_end))
            if here:
                start = len(sequence.text)
                rows.log_probs[sequence.row, start : start + count] = log_probs[i, :count]
                sequence.text.extend(row[:count])
                sequence.num_passes += 1
                accepted.append(num_accepted)
        return tokens, ended, accepted

    @torch.inference_mode()
    def _decide_again(self, started: _Round) -> tuple[list[list[int]], list[bool], list[int]]:
        """A near-tie was reached: undo the commitment and accept the same drafts as on the host, by the guard."""
        assert started.before is not None and not self._ahead
        rows = self.residents.rows
        rows.lengths.copy_(started.before[0])
        rows.caps.copy_(started.before[1])
        drafts = started.drafts
        if drafts.parents is not None:
            drafts = tree(drafts.tokens, drafts.parents, drafts.num_nodes - 1)
        noise = self.noise.at(rows.response_lengths, started.strategy.depth + 1)
        hidden, logits = self._verify(drafts, self._layout)
        verdict = self._accept(drafts, logits, by_node(noise, drafts))
        self._commit(drafts, verdict, hidden, logits)
        return append(started.sequences, verdict)

    # -- what a cost profile times ------------------------------------------------------------------------------

    @torch.inference_mode()
    def time_verify(self, width: int) -> float:
        if width > MAX_NODES:
            return super().time_verify(width)
        rows = self.residents.rows
        last = rows.last_tokens(self._bucket())
        drafts = DraftTree(last.unsqueeze(1).expand(-1, width).contiguous())
        state = rows.lengths.clone(), rows.caps.clone()
        self._run_verify(drafts)  # captured before it is timed

        def verify() -> None:
            self._run_verify(drafts)

        seconds = self._time(verify)
        rows.lengths.copy_(state[0])
        rows.caps.copy_(state[1])
        return seconds

    @torch.inference_mode()
    def time_draft(self, strategy: Strategy) -> float:
        if not self._fits_graphs(strategy):
            return super().time_draft(strategy)
        self._drafts(strategy)

        def draft() -> None:
            self._drafts(strategy)

        return self._time(draft)

    def _bucket(self) -> int:
        return next(size for size in self._buckets if size >= self.residents.rows.num_live)

    def _pool(self) -> GraphPool:
        if self._ends is not self.residents.rows.ends:  # more end tokens than ever before: the graphs read the old ones
            self._graphs, self._ends = GraphPool(self.decoder.device), self.residents.rows.ends
        return self._graphs


@dataclass(frozen=True)
class _Form:
    """What a target graph depends on beside the batch."""

    width: int
    is_tree: bool

    @classmethod
    def of(cls, strategy: Strategy) -> _Form:
        return cls(strategy.widest_pass, strategy.branching > 1 or strategy.source == "hybrid")


@dataclass(frozen=True, eq=False)
class _Round:
    """A launched round: what it was given, and where it tells the host what came of it."""

    rounds: DeviceRounds
    strategy: Strategy
    sequences: list[Response]
    watch: _Stopwatch
    drafts: DraftTree
    told: Tensor
    """[B, N + 4]: choices along the path, then their count, whether an end, drafts accepted, whether a near-tie."""
    log_probs: Tensor
    faults: Tensor | None
    before: tuple[Tensor, Tensor] | None
    """Lengths and caps before it, kept for the tie guard."""
    stays: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stays", tuple(sequence.stay for sequence in self.sequences))

    @property
    def most_tokens(self) -> int:
        return self.told.shape[1] - 4

    def read(self) -> Emitted:
        return self.rounds.read(self)


class _Stopwatch:
    """The times at marks in the device's work, by events on CUDA; the first mark is set at the start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self.mark()

    def mark(self) -> None:
        if self._device.type != "cuda":
            self._times.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def wait(self) -> list[float]:
        """Wait for the last mark without a busy loop; the seconds from each mark to the next."""
        if self._device.type != "cuda":
            return [after - before for before, after in pairwise(self._times)]
        self._events[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(self._events)]


def _is_special(sequence: Response) -> bool:
    """Whether its next token may be chosen by more than temperature and noise."""
    return sequence.rule.truncates or sequence.num_response < sequence.params.min_tokens


def _noise_on_host(sequences: Sequence[Response]) -> NoiseAt:
    words = [noise_key(sequence.request.key) for sequence in sequences]
    first = [sequence.num_response for sequence in sequences]
    return lambda row, d, token: gumbel_number(words[row], first[row] + d, token)


def _rows_of(drafts: DraftTree, rows: slice) -> DraftTree:
    return DraftTree(drafts.tokens[rows], None if drafts.parents is None else drafts.parents[rows])


def _to_host(x: Tensor) -> Tensor:
    """A copy on the host, complete once the device has passed what is queued before it."""
    if not x.is_cuda:
        return x.clone()
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
