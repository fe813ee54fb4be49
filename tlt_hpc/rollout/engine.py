"""The rollout engine: requests in, finished responses out; each ``step`` decodes one round of all live sequences.

A response depends on the weights and its key only. Speculation, batch size, number of ranks, preemption and changes of
strategy affect how fast it is generated, never its text.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tlt_hpc.common.records import (
    NO_SPANS,
    PREFILL,
    EngineSpans,
    FinishReason,
    Request,
    Rollout,
    SampleKey,
    SamplingParams,
)
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.rollout.ahead_work import AheadWork, Texts
from tlt_hpc.rollout.chooser import Agree, Chooser, DraftTally, RandomChooser
from tlt_hpc.rollout.decoding import Emitted, HostRounds, PhaseSeconds
from tlt_hpc.rollout.device_cache import DevicePagedCache, make_cache
from tlt_hpc.rollout.device_rounds import DeviceRounds
from tlt_hpc.rollout.drafts import LearnedDrafts
from tlt_hpc.rollout.feature_outbox import FeatureOutbox
from tlt_hpc.rollout.guard import NUM_PROBED, TieGuard
from tlt_hpc.rollout.kv_cache import PoolSizes, page_bytes
from tlt_hpc.rollout.ngram_drafts import NgramDrafts
from tlt_hpc.rollout.noise import NoiseWindow
from tlt_hpc.rollout.responses import Response
from tlt_hpc.rollout.rows import LiveRows
from tlt_hpc.rollout.sampling import SamplingRule
from tlt_hpc.rollout.scheduler import Scheduler
from tlt_hpc.rollout.settings import EngineSettings, check_request, check_settings
from tlt_hpc.rollout.stops import StopStrings
from tlt_hpc.rollout.stored_text import StoredRow, StoredText
from tlt_hpc.rollout.strategy import OFF, Strategy

_AHEAD_SECONDS = 0.02
"""Longest step, prefill and round, of what is generated ahead: it must not delay the end of a rollout."""
_ROWS_AT_ONCE, _LEAST_PREFILL, _DEVICE_PREFILL = 8, 64, 512
"""Rows that are added to it at once, as long as there is time left, and tokens of its prefill chunks: at least on a
host, and always on a device.
"""


@dataclass
class EngineCounts:
    """What the engine did since its counts were last taken."""

    num_tokens: int = 0
    num_row_passes: int = 0
    """Sequences, summed over rounds: tokens divided by this is the accept length."""
    num_guarded: int = 0
    num_preempted: int = 0
    num_drafter_faults: int = 0
    num_stored: int = 0
    """Drafts from stored texts that were verified."""
    num_stored_accepted: int = 0
    num_ahead: int = 0
    """Tokens generated ahead; no other count includes them."""
    strategies: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Rounds and tokens of each strategy."""
    drafts: dict[str, DraftTally] = field(default_factory=dict)
    """Drafts verified and accepted by position, of each family of strategies."""
    seconds: PhaseSeconds = field(default_factory=PhaseSeconds)
    spans: EngineSpans = NO_SPANS
    """When each round and each prefill pass ran; filled in when the counts are taken."""
    spans_so_far: list[tuple[int, int, int, float, float]] = field(default_factory=list)

    def without_shared_counts(self) -> EngineCounts:
        """Only what is this rank's own, its seconds: for ranks that decode together, of which one reports the rest."""
        strategies = dict.fromkeys(self.strategies, (0, 0))
        return EngineCounts(strategies=strategies, seconds=self.seconds, spans=self.spans)


class RolloutEngine:
    """Continuous batching over paged memory, with speculation that in float32 does not change the text."""

    def __init__(
        self,
        decoder: Decoder,
        settings: EngineSettings,
        drafter: Drafter | None = None,
        agree: Agree | None = None,
    ) -> None:
        """``agree``: for ranks that decode the same responses together, see ``Chooser``.

        Such ranks are given the same requests in the same order and step together; the rest follows from the texts.
        """
        check_settings(settings, drafter)
        self.decoder, self.settings, self.drafter, self._agree = decoder, settings, drafter, agree
        sizes = self._pool_sizes()
        self._rows = LiveRows(settings.max_live, sizes.num_positions, decoder.device, settings.eos_token_ids)
        self._cache = make_cache(decoder.part, sizes, decoder.dtype, decoder.device, settings.attention)
        depth = max(strategy.depth for strategy in settings.strategies)
        self._noise = NoiseWindow(settings.max_live, settings.num_tokens, depth + 1, decoder.device)
        self._most_slots = max(strategy.num_slots for strategy in settings.strategies)
        self._guard = TieGuard(decoder, settings.tie_guard, settings.attention)
        self._learned: LearnedDrafts | None = None
        if drafter is not None:
            drafter.pack()
            self._learned = LearnedDrafts(drafter, decoder, self._cache, settings.max_live, settings.num_tokens)
        self._ngram = NgramDrafts(any(strategy.source == "ngram" for strategy in settings.strategies))
        self._scheduler = Scheduler(
            decoder, self._rows, self._cache, self._noise, self._learned, settings.prefill_tokens
        )
        parts = decoder, self._scheduler, self._noise, self._guard, self._learned, self._ngram
        on_device = isinstance(self._cache, DevicePagedCache)
        self._rounds = DeviceRounds(*parts, strategies=settings.strategies) if on_device else HostRounds(*parts)
        self.chooser = self._make_chooser()
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self.finished: list[Rollout] = []
        """Responses that have ended and were not collected yet, in the order in which they ended."""
        self.outbox = FeatureOutbox(self._cache, decoder.shape.hidden_size)
        """Hands the features of finished responses to its ``sink``, where a drafter is trained."""
        self._longest: list[list[int]] = []
        """The longest texts finished since the last load of weights."""
        self._probed: list[int] = []
        """The text on which the tie guard measured last."""
        self._num_submitted = 0
        self._counts = self._new_counts()
        self.drafter_ready = False
        """Whether the drafter has ever been trained; an untrained one is not worth trying."""
        self.keeps: Callable[[SampleKey], bool] = lambda key: True
        """Which finished responses, and their features, this rank hands out."""
        self._prepare_ahead()
        self.text_mark = 0
        """A checksum of all text emitted so far, to compare between ranks that decode together."""

    def _prepare_ahead(self) -> None:
        """What is kept of draft-ahead: nothing is generated ahead yet, and no text is stored."""
        self.ahead = AheadWork()
        self._num_own = 0
        """The step's own requests that have not finished. Nothing is generated ahead until there are none."""
        # what a device does is not timed here, and ranks that step together must read the same
        is_host = self.decoder.device.type == "cpu"
        self._times_prefill = is_host and self._agree is None
        self._least_prefill = _LEAST_PREFILL if is_host else _DEVICE_PREFILL
        self._prefill_rate = 0.0
        """Positions a second, of the last chunk."""
        self._round_seconds = 0.0
        """Of the last round that was read."""
        self.stored_texts: Texts = {}
        self._stored_rows: list[StoredRow] = []
        """What the round was chosen with; a round with stored texts is read before the next one is chosen."""

    def _make_chooser(self) -> Chooser:
        settings = self.settings
        strategies = settings.strategies if OFF in settings.strategies else (OFF, *settings.strategies)
        kind = RandomChooser if settings.chooser == "random" else Chooser
        return kind(strategies, settings.seed, self._agree if len(strategies) > 1 else None)

    def _pool_sizes(self) -> PoolSizes:
        """Sizes of the cache within the budget.

        Raises:
            ValueError: the budget does not hold a single sequence of full length.
        """
        settings = self.settings
        num_features = self.drafter.num_features if self.drafter is not None else 0
        reach = max(strategy.num_slots for strategy in settings.strategies)
        num_positions = settings.max_prompt_tokens + settings.params.max_tokens + reach + 1
        each = -(-num_positions // settings.page_size)
        size = page_bytes(self.decoder.part, settings.page_size, self.decoder.dtype, num_features)
        # one page more than those given to sequences takes values that must not be kept
        num_pages = max(0, settings.kv_bytes // size - 1) if settings.kv_bytes else settings.max_live * each
        if num_pages < each:
            raise ValueError(
                f"rollout.kv_bytes = {settings.kv_bytes} holds {num_pages} pages of {settings.page_size} tokens, one "
                f"sequence of full length takes {each}; give at least {(each + 1) * size} or lower "
                "rollout.max_new_tokens"
            )
        return PoolSizes(num_pages, settings.page_size, settings.max_live, num_positions, num_features)

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests.

        Raises:
            ValueError: a prompt is empty, or a prompt or a length is not what the engine was built for.
        """
        assert not self._guard.active or self._guard.logit_tolerance > 0, "calibrate the tie guard first"
        checked = [(request, request.params or self.settings.params) for request in requests]
        for request, params in checked:
            check_request(request, params, self.settings, self.decoder.shape.vocab_size)
        if not self._num_own:
            self.abort()  # what is generated ahead makes room
        for request, params in checked:
            self._num_submitted += 1
            self._num_own += 1
            self._scheduler.wait(self._response(request, params))

    def _response(self, request: Request, params: SamplingParams) -> Response:
        return Response(
            request=request,
            params=params,
            rule=self._rule(params),
            order=self._num_submitted,
            stops=self._stops_of(params),
            text=request.prompt_tokens.tolist(),
            stored=StoredText(self.stored_texts[request.key].tolist()) if request.key in self.stored_texts else None,
        )

    def _stops_of(self, params: SamplingParams) -> StopStrings | None:
        if not params.stop_strings:
            return None
        assert self.settings.detokenize is not None
        if params.stop_strings not in self._stops:
            self._stops[params.stop_strings] = StopStrings(params.stop_strings, self.settings.detokenize)
        return self._stops[params.stop_strings]

    def _rule(self, params: SamplingParams) -> SamplingRule:
        return SamplingRule(
            float(params.temperature), self.settings.num_tokens, params.top_k, params.top_p, params.min_p
        )

    @property
    def has_work(self) -> bool:
        return self._num_own > 0

    @property
    def has_waiting(self) -> bool:
        """Whether the next step may prefill."""
        return bool(self._scheduler.waiting) or bool(self._scheduler.prefilling)

    @property
    def num_unfinished(self) -> int:
        return self._num_own

    @property
    def num_tokens(self) -> int:
        """Response tokens since the counts were last taken."""
        return self._counts.num_tokens

    def collect(self) -> list[Rollout]:
        """The finished responses in the order of their keys; the engine forgets them."""
        finished, self.finished = sorted(self.finished, key=lambda rollout: rollout.key), []
        return finished

    def abort(self) -> int:
        """Drop all requests that have not finished; returns how many. What is generated ahead is put aside."""
        with self._own_seconds():
            self._settle()
        dropped = self._scheduler.abort()
        if not self._num_own:
            self.ahead.waiting = [*dropped, *self.ahead.waiting]
        count, self._num_own = self._num_own, 0
        self._settle_at_end()
        return count

    def take_counts(self) -> EngineCounts:
        """The counts since the last call; starts new ones."""
        counts, self._counts = self._counts, self._new_counts()
        counts.num_guarded, self._guard.num_guarded = self._guard.num_guarded, 0
        counts.num_preempted, self._scheduler.num_preempted = self._scheduler.num_preempted, 0
        counts.num_drafter_faults, self._rounds.num_faults = self._rounds.num_faults, 0
        counts.seconds, self._rounds.seconds = self._rounds.seconds, PhaseSeconds()
        spans = counts.spans_so_far
        columns = zip(*spans, strict=True) if spans else ((),) * len(vars(NO_SPANS))
        kinds = [column.dtype for column in vars(NO_SPANS).values()]
        counts.spans = EngineSpans(*map(np.array, columns, kinds))
        return counts

    def _new_counts(self) -> EngineCounts:
        return EngineCounts(strategies={strategy.name: (0, 0) for strategy in self.chooser.strategies})

    def memory_table(self) -> dict[str, int]:
        """Bytes that the engine holds, by purpose; the cache is allocated as a whole at the start."""
        drafter = sum(p.nbytes for p in self.drafter.parameters()) if self.drafter is not None else 0
        return {
            "weights": self.decoder.weight_bytes,
            "packed weights": self.decoder.packed_bytes,
            "drafter": drafter,
            "packed drafter": 0 if self.drafter is None else self.drafter.packed_bytes,
            "drafts' part of the head": 0 if self._learned is None else self._learned.head_bytes,
            "keys, values, features": self._cache.num_bytes,
            "noise and rows": self._noise.num_bytes + self._rows.num_bytes,
            "graphs": self._rounds.graph_bytes,
        }

    # -- ahead --------------------------------------------------------------------------------------------------

    def submit_ahead(self, requests: Iterable[Request]) -> None:
        """Queue requests of a later step, whose texts are drafts then.

        They are decoded where ``step`` is called and none of this step is left. Counts and features that are handed out
        do not include them.
        """
        for request in requests:
            self._num_submitted += 1
            response = self._response(request, request.params or self.settings.params)
            response.is_ahead = True
            self.ahead.waiting.append(response)

    @property
    def has_ahead(self) -> bool:
        """Whether there is anything to generate ahead."""
        return bool(self.ahead.waiting) or self._scheduler.num_unfinished > self._num_own

    def _admit_ahead(self) -> None:
        """Let responses of a later step have rows: a few at a time, so that prefill and round stay short."""
        waiting, scheduler, rows = self.ahead.waiting, self._scheduler, self._rows
        if self._num_own or not waiting or scheduler.waiting:
            return
        num_free = rows.capacity - rows.num_live - len(scheduler.prefilling)
        if self._agree is None:  # ranks that step together measure different times
            has_time = self._round_seconds < _AHEAD_SECONDS or not (rows.num_live or scheduler.prefilling)
            num_free = min(num_free, _ROWS_AT_ONCE * has_time)
        for response in waiting[:num_free]:
            scheduler.wait(response)
        del waiting[:num_free]

    def draft_from(self, texts: Texts) -> None:
        """Draft from these texts for requests with these keys that are submitted from now on."""
        self.stored_texts = texts

    # -- weights ------------------------------------------------------------------------------------------------

    def load_policy(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load new weights in place and measure the tie guard's tolerance with one more text.

        Only between rollouts: keys and values of live sequences would belong to the old weights.
        """
        assert not self.has_work and not self.has_ahead, "weights change only between rollouts"
        self._settle()
        self.decoder.load(weights, version)
        if self._learned is not None:
            self._learned.read_head()
        self.outbox.forget_prompts()
        self._cache.renew()
        self._probe(1)

    def release_pages(self) -> None:
        """Give the memory of keys, values and features to others until the next ``load_policy``; between rollouts."""
        assert not self.has_work and not self.has_ahead, "live sequences need their pages"
        self._settle()
        self._cache.release()

    def close(self) -> None:
        """Give the pages' memory back for good: graphs hold the engine in a cycle, which is collected late."""
        self._cache.close()

    def load_drafter(self, weights: Mapping[str, Tensor], trained: bool = True) -> None:
        """Load new drafter weights in place, between rounds; counts of accepted drafts are discounted."""
        assert self.drafter is not None and self._learned is not None
        self._settle()
        self.drafter.load_state_dict(weights)
        self._learned.forget(self._rows.responses)
        self._cache.clear(drafter_only=True)
        self._rounds.drafter_is_sound = True
        self.drafter_ready = trained
        self.chooser.discount(0.5)

    def calibrate(self, requests: Sequence[Request]) -> None:
        """Prepare for the first rollout: capture graphs on a GPU, measure the tie guard's tolerance on real text.

        The text is that of responses that are discarded: the requests' keys must not be those of a rollout. Random
        tokens would not do: far from what a model was trained on, its activations and the error are larger.
        """
        assert not self.has_work and not self._probed and requests
        if self.decoder.device.type == "cuda":
            truncates = self._rule(self.settings.params).truncates
            for is_simple in {not truncates, not (truncates or self.settings.params.min_tokens)}:
                self._rounds.capture(is_simple)
        if not self.settings.tie_guard:
            return
        uses_ngram, self._ngram.active, self._guard.active = self._ngram.active, False, False
        self.submit(requests)
        while self.has_work:
            self._fill()
            if self._rows.num_live:
                self._scheduler.reserve(1)
                self._rounds.launch(OFF)
                self._retire(self._rounds.read())
        self.finished = []
        self._ngram.active, self._guard.active = uses_ngram, True
        self._probe(NUM_PROBED)
        self.take_counts()

    def _probe(self, most: int) -> None:
        """Set the tie guard by the longest texts since the last load, or by the last one again where there are none."""
        texts = self._longest[-most:] or [self._probed]
        self._longest, self._probed = [], texts[-1]
        if self.settings.tie_guard and self._probed:
            self._guard.probe(texts)

    # -- rounds -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Admit what fits, prefill a chunk, decode one round, retire what finished.

        On a device the round is launched and the one before it is read, so what finishes is known a step later.
        """
        had_work = self.has_work
        with self._own_seconds():
            self._admit_ahead()
            has_prefilled = self._fill()
            if self._rows.num_live:
                self._decode(has_prefilled)
            if had_work or not self.has_ahead:
                self._settle_at_end()

    @contextmanager
    def _own_seconds(self) -> Iterator[None]:
        """Keep the seconds of what is generated ahead out of the step's."""
        seconds = self._rounds.seconds
        if not self._num_own:
            self._rounds.seconds = PhaseSeconds()
        yield
        self._rounds.seconds = seconds

    def _settle_at_end(self) -> None:
        """When the step's own requests have finished, read the last rounds and hand over all features."""
        if not self.has_work:
            self._settle()
            self.outbox.deliver(wait=True)

    def _fill(self) -> bool:
        """Admit and prefill; returns whether anything was prefilled."""
        self._scheduler.admit()
        num_prefilling = len(self._scheduler.prefilling)
        if num_prefilling:
            is_own = self.has_work
            # ranks that read a chunk together must cut it alike
            round_seconds = self._round_seconds if self._rows.num_live else 0.0
            fitting = int((_AHEAD_SECONDS - round_seconds) * self._prefill_rate) if self._times_prefill else 0
            most = self.settings.prefill_tokens
            self._scheduler.prefill_tokens = most if is_own else min(most, max(self._least_prefill, fitting))
            start = time.perf_counter()
            num_read = self._scheduler.prefill()
            seconds = time.perf_counter() - start
            self._prefill_rate = num_read / max(seconds, 1e-6)
            if is_own:
                self._note_span(PREFILL, num_prefilling, num_read, seconds)
        return num_prefilling > 0

    def _decode(self, has_prefilled: bool) -> None:
        stored = self._rounds.stored
        if stored.exist:  # the cursors need the texts
            self._settle()
            if not self._rows.num_live:
                return
        start = time.perf_counter()
        self._stored_rows = stored.arrange() if stored.exist else []
        strategy = self._choose()
        overlaps = self._rounds.overlaps(strategy)
        prepared = time.perf_counter() - start
        if not overlaps:
            self._settle()
            if not self._rows.num_live:
                return
        start = time.perf_counter()
        self._scheduler.reserve(strategy.num_slots, self._rounds.ahead)
        if not self._rows.num_live:  # all were preempted for an earlier response that is being prefilled
            return
        if "ngram" in (strategy.source, strategy.rest and strategy.rest.source):
            self._ngram.learn(self._rows.responses)
        prepared += time.perf_counter() - start
        assert all(one.is_ahead is not self.has_work for one in self._rows.responses), "rows of two kinds in a round"
        self._rounds.launch(strategy, prepared, follows=not has_prefilled)
        self._settle(int(overlaps))

    def _settle(self, num_left: int = 0) -> None:
        """Read the launched rounds until ``num_left`` are left."""
        while self._rounds.num_under_way > num_left:
            self._take_in(self._rounds.read())
        self.outbox.deliver(wait=False)

    def _take_in(self, emitted: Emitted) -> None:
        start = time.perf_counter()
        self._cut_at_stops(emitted)
        if self._agree is not None:
            self.text_mark = zlib.crc32(repr(emitted.tokens).encode(), self.text_mark)
        is_own, num_live = not emitted.responses[0].is_ahead, len(emitted.responses)
        num_tokens, num_told = sum(map(len, emitted.tokens)), sum(map(bool, emitted.tokens))
        for response, tokens in zip(emitted.responses, emitted.tokens, strict=True):
            if tokens:
                response.pass_lengths.append(len(tokens))
        self._counts.num_tokens += num_tokens * is_own
        self._counts.num_ahead += num_tokens * (not is_own)
        self._counts.num_row_passes += num_told * is_own
        # a drafter that failed left a plain round: nothing is learned from it
        seconds = emitted.seconds + (0.0 if emitted.is_hidden else time.perf_counter() - start)
        self._round_seconds = seconds
        if is_own:
            self._note_span(self.chooser.index_of(emitted.strategy), num_live, num_tokens, seconds)
        if num_tokens and emitted.tells:
            strategy = emitted.strategy
            stored = self._stored_rows if strategy.rest else []
            self.chooser.observe(strategy, num_live, num_tokens, seconds, emitted.accepted, stored)
            if is_own:
                self._count(strategy, emitted.accepted, stored, num_tokens)
        self._retire(emitted)

    def _count(self, strategy: Strategy, accepted: Sequence[int], stored: list[StoredRow], num_tokens: int) -> None:
        counts = self._counts
        rounds, tokens = counts.strategies[strategy.name]
        counts.strategies[strategy.name] = rounds + 1, tokens + num_tokens
        if strategy.rest:
            num_rest = len(accepted) - len(stored)
            counts.num_stored += sum(min(row.num_drafts, strategy.depth) for row in stored)
            counts.num_stored_accepted += sum(accepted[num_rest:])
            strategy, accepted = strategy.rest, accepted[:num_rest]
        if accepted:
            counts.drafts.setdefault(strategy.family, DraftTally()).add(strategy.reach, accepted)

    def _note_span(self, strategy_index: int, num_live: int, num_tokens: int, seconds: float) -> None:
        """Log a round, or with ``PREFILL`` as its index a prefill pass, that has just ended."""
        self._counts.spans_so_far.append((strategy_index, num_live, num_tokens, time.time() - seconds, seconds))

    def _choose(self) -> Strategy:
        """The round's strategy, among those that have a sound drafter and need no preemption."""
        drafts, widest = self.drafter_ready and self._rounds.drafter_is_sound, self._most_slots
        has_room_for_all = self._has_room(widest)
        usable = [
            strategy
            for strategy in self.settings.strategies
            if (drafts or not strategy.has_drafter)
            and (has_room_for_all or strategy == OFF or self._has_room(strategy.num_slots))
            and self._rows.num_live <= strategy.most_rows(self.decoder.shape.vocab_size)
        ]
        return self.chooser.choose(self._rows.num_live, usable or [OFF], self._stored_rows)

    def _has_room(self, num_slots: int) -> bool:
        return self._scheduler.has_room(num_slots, self._rounds.ahead)

    def _cut_at_stops(self, emitted: Emitted) -> None:
        """End responses at the token that completes a stop string; what came after it in the same round is dropped."""
        for i, response in enumerate(emitted.responses):
            if response.stops is None or not emitted.tokens[i]:
                continue
            start = response.prompt_length
            index = response.stops.first_stop(response.text, start + response.num_checked, start)
            response.num_checked = response.num_response
            if index is not None:
                dropped = len(response.text) - (index + 1)
                if dropped:
                    del response.text[index + 1 :]
                    del emitted.tokens[i][-dropped:]
                response.is_stopped = not (emitted.ended[i] and dropped == 0)
                emitted.ended[i] = True

    def _retire(self, emitted: Emitted) -> None:
        """Finish what has ended; the others keep the order of their rows as far as they can."""
        ended = sorted(zip(emitted.responses, emitted.ended, strict=True), key=lambda pair: -pair[0].row)
        for response, has_ended in ended:
            if has_ended:
                self._finish(response, FinishReason.STOP if response.is_stopped else FinishReason.EOS)
            elif response.row >= 0 and response.num_response >= response.params.max_tokens:
                self._finish(response, FinishReason.LENGTH)

    def _finish(self, response: Response, reason: FinishReason) -> None:
        row, request, start = response.row, response.request, response.prompt_length
        if response.is_ahead:
            self.ahead.keep(response)
            self._scheduler.remove(row)
            return
        self._num_own -= 1
        response.stored = None
        log_probs = self._rows.response_log_probs(row).numpy().copy()
        if self.keeps(request.key):
            rollout = Rollout(
                key=request.key,
                prompt_tokens=request.prompt_tokens,
                response_tokens=np.array(response.text[start:], dtype=np.int32),
                log_probs=log_probs,
                finish_reason=reason,
                weight_version=self.decoder.version,
                num_target_passes=len(response.pass_lengths),
                finished_seconds=time.time(),
                pass_lengths=np.frombuffer(bytes(response.pass_lengths), np.uint8),
            )
            self.finished.append(rollout)
            self.outbox.take(response)
        self._ngram.finish(response)
        self._longest = sorted([*self._longest, response.text], key=len)[-NUM_PROBED:]
        self._scheduler.remove(row)
