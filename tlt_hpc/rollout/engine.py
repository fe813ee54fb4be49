"""The rollout engine: requests in, finished responses out; each ``step`` decodes one round of all live sequences.

A response depends on the weights and its key only. Speculation, batch size, number of ranks, preemption and changes of
strategy affect how fast it is generated, never its text.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from tlt_hpc.common.records import PREFILL, FinishReason, Request, Rollout, SampleKey, SamplingParams
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.rollout.chooser import Agree, Chooser, RandomChooser
from tlt_hpc.rollout.decoding import DecodingRounds
from tlt_hpc.rollout.device_cache import make_cache
from tlt_hpc.rollout.drafts import LearnedDrafts
from tlt_hpc.rollout.feature_outbox import FeatureOutbox
from tlt_hpc.rollout.noise import NoiseWindow
from tlt_hpc.rollout.responses import AheadQueue, Response, Texts
from tlt_hpc.rollout.rounds import EngineCounts, RoundPlan, RoundResult
from tlt_hpc.rollout.rows import LiveRows
from tlt_hpc.rollout.sampling import SamplingRule
from tlt_hpc.rollout.scheduler import Scheduler
from tlt_hpc.rollout.settings import EngineSettings, check_request, check_settings, pool_sizes
from tlt_hpc.rollout.stops import StopStrings
from tlt_hpc.rollout.stored_text import StoredText
from tlt_hpc.rollout.strategy import OFF, STORED, Strategy
from tlt_hpc.rollout.tie_guard import NUM_PROBED, TieGuard


class RolloutEngine:
    """Continuous batching over paged memory, with speculation that does not change the text."""

    def __init__(
        self,
        decoder: Decoder,
        settings: EngineSettings,
        drafter: Drafter | None = None,
        agree: Agree | None = None,
        keeps: Callable[[SampleKey], bool] = lambda key: True,
        drafter_is_trained: bool = False,
    ) -> None:
        """Allocate the pages; ``load_policy`` and ``calibrate`` come before the first request.

        Args:
            agree: for ranks that decode the same responses together, see ``Chooser``. Such ranks are given the same
                requests in the same order and step together; the rest follows from the texts.
            keeps: which finished responses, and their features, this rank hands out.
            drafter_is_trained: whether the drafter was ever trained; an untrained one is not worth trying.

        Raises:
            ValueError: the budget does not hold a single sequence of full length, or the drafter does not fit.
        """
        check_settings(settings, drafter)
        self.decoder, self.settings, self.drafter, self._agree = decoder, settings, drafter, agree
        self._keeps, self._drafter_is_trained = keeps, drafter_is_trained
        sizes = pool_sizes(settings, decoder, drafter.num_features if drafter is not None else 0)
        self._rows = LiveRows(settings.max_live, sizes.num_positions, decoder.device, settings.eos_token_ids)
        self._cache = make_cache(decoder.part, sizes, decoder.dtype, decoder.device, settings.attention)
        num_rows = settings.max_live + 1
        self._noise = NoiseWindow(num_rows, settings.num_tokens, settings.max_depth + 1, decoder.device)
        self._max_stored_tokens = min(settings.max_pass_tokens(decoder.shape.vocab_size).values())
        self._guard = TieGuard(decoder, settings.tie_guard, settings.attention)
        self._learned: LearnedDrafts | None = None
        if drafter is not None:
            drafter.pack_weights()
            self._learned = LearnedDrafts(drafter, decoder, self._cache, num_rows, settings.num_tokens)
        self._scheduler = Scheduler(self._rows, self._cache, self._noise, self._learned)
        self._rounds = DecodingRounds(decoder, settings, self._scheduler, self._noise, self._guard, self._learned)
        self._ngram = self._rounds.ngram
        self.chooser = self._make_chooser()
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._finished: list[Rollout] = []
        self.outbox = FeatureOutbox(self._cache, decoder.shape.hidden_size)
        """Hands over the features of finished responses where a drafter is trained."""
        self._num_submitted = self._num_own = 0
        """Requests of all kinds so far; the step's own that have not finished."""
        self._counts = self._new_counts()
        self.ahead = AheadQueue(is_host=decoder.device.type == "cpu", is_alone=agree is None)
        """Responses that are generated ahead, where there are no own requests."""
        self._stored_texts: Texts = {}
        self.text_mark = 0
        """A checksum of all text emitted so far, to compare between ranks that decode together."""

    def _make_chooser(self) -> Chooser:
        settings = self.settings
        strategies = settings.strategies if OFF in settings.strategies else (OFF, *settings.strategies)
        kind = RandomChooser if settings.chooser == "random" else Chooser
        has_choice = len(strategies) > 1 or settings.stored_texts
        return kind(strategies, settings.seed, self._agree if has_choice else None)

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
            self._scheduler.enqueue(self._make_response(request, params))

    def _make_response(self, request: Request, params: SamplingParams) -> Response:
        stored = self._stored_texts.get(request.key)
        return Response(
            request=request,
            params=params,
            rule=self._make_sampling_rule(params),
            order=self._num_submitted,
            stops=self._stop_strings_of(params),
            text=request.prompt_tokens.tolist(),
            stored=StoredText(stored.tolist()) if stored is not None else None,
        )

    def _stop_strings_of(self, params: SamplingParams) -> StopStrings | None:
        if not params.stop_strings:
            return None
        assert self.settings.detokenize is not None
        if params.stop_strings not in self._stops:
            self._stops[params.stop_strings] = StopStrings(params.stop_strings, self.settings.detokenize)
        return self._stops[params.stop_strings]

    def _make_sampling_rule(self, params: SamplingParams) -> SamplingRule:
        return SamplingRule(float(params.temperature), self.settings.num_tokens, params.top_k, params.top_p)

    @property
    def has_work(self) -> bool:
        """True if any of the step's own requests has not finished."""
        return self._num_own > 0

    @property
    def may_prefill(self) -> bool:
        """True if the next step may prefill."""
        return bool(self._scheduler.waiting) or bool(self._scheduler.prefilling)

    @property
    def num_unfinished(self) -> int:
        """Number of the step's own requests that have not finished."""
        return self._num_own

    @property
    def num_tokens(self) -> int:
        """Response tokens since the counts were last taken."""
        return self._counts.num_tokens

    @property
    def finished_rollouts(self) -> Sequence[Rollout]:
        """Responses that have ended and were not collected yet, in the order in which they ended."""
        return self._finished

    def add_finished_rollouts(self, rollouts: Iterable[Rollout]) -> None:
        """Add responses that were generated before, in another process."""
        self._finished += rollouts

    def take_finished_rollouts(self) -> list[Rollout]:
        """The finished responses in the order of their keys; the engine forgets them."""
        finished, self._finished = sorted(self._finished, key=lambda rollout: rollout.key), []
        return finished

    def abort(self) -> int:
        """Drop all requests that have not finished; returns how many. What is generated ahead is put aside."""
        self._finish_launched_rounds()
        dropped = self._scheduler.abort()
        if not self._num_own:
            self.ahead.waiting = [*dropped, *self.ahead.waiting]
        count, self._num_own = self._num_own, 0
        self._finish_rounds_at_end()
        return count

    def take_counts(self) -> EngineCounts:
        """The counts since the last call; starts new ones."""
        counts, self._counts = self._counts, self._new_counts()
        counts.num_guarded, self._guard.num_guarded = self._guard.num_guarded, 0
        return counts

    def _new_counts(self) -> EngineCounts:
        names = [strategy.name for strategy in self.chooser.strategies]
        return EngineCounts(strategies=dict.fromkeys([*names, *[STORED] * self.settings.stored_texts], (0, 0)))

    def memory_table(self) -> dict[str, int]:
        """Bytes that the engine holds, by purpose; the cache is allocated as a whole at the start."""
        drafter = sum(p.nbytes for p in self.drafter.parameters()) if self.drafter is not None else 0
        angles = self.decoder.rotaries.num_bytes + (self.drafter.rotary.num_bytes if self.drafter is not None else 0)
        return {
            "weights": self.decoder.weight_bytes,
            "packed weights": self.decoder.packed_bytes,
            "drafter": drafter,
            "packed drafter": 0 if self.drafter is None else self.drafter.packed_bytes,
            "drafts' part of the head": 0 if self._learned is None else self._learned.head_bytes,
            "keys, values, features": self._cache.num_bytes,
            "noise and rows": self._noise.num_bytes + self._rows.num_bytes,
            "angles": angles,
            "graphs": self._rounds.graphs.num_bytes if self._rounds.graphs else 0,
        }

    # -- ahead --------------------------------------------------------------------------------------------------

    def submit_ahead(self, requests: Iterable[Request]) -> None:
        """Queue requests of a later step, whose texts are drafts then.

        They are decoded where ``step`` is called and none of this step is left. Counts and features that are handed out
        do not include them.
        """
        for request in requests:
            self._num_submitted += 1
            response = self._make_response(request, request.params or self.settings.params)
            response.is_ahead = True
            self.ahead.waiting.append(response)

    @property
    def has_ahead_work(self) -> bool:
        """True if there is anything to generate ahead."""
        return bool(self.ahead.waiting) or self._scheduler.num_unfinished > self._num_own

    def set_stored_texts(self, texts: Texts) -> None:
        """Draft from these texts for requests with these keys that are submitted from now on."""
        self._stored_texts = texts

    @property
    def num_stored_tokens(self) -> int:
        """Tokens of the texts that are drafted from."""
        return sum(map(len, self._stored_texts.values()))

    # -- weights ------------------------------------------------------------------------------------------------

    def load_policy(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load new weights in place and measure the tie guard's tolerance with one more text.

        Only between rollouts: keys and values of live sequences would belong to the old weights.
        """
        assert not self.has_work and not self.has_ahead_work, "weights change only between rollouts"
        self._finish_launched_rounds()
        self.decoder.load_weights(weights, version)
        if self._learned is not None:
            self._learned.copy_target_head()
        self.outbox.forget_prompts()
        self._cache.restore_and_clear()
        self._guard.measure_on_longest_texts(1)

    def release_pages(self) -> None:
        """Give the memory of keys, values and features to others until the next ``load_policy``; between rollouts."""
        assert not self.has_work and not self.has_ahead_work, "live sequences need their pages"
        self._finish_launched_rounds()
        self._cache.release()

    def close(self) -> None:
        """Give the pages' memory back for good: graphs hold the engine in a cycle, which is collected late."""
        self._cache.close()

    def load_drafter(self, weights: Mapping[str, Tensor], trained: bool = True) -> None:
        """Load new drafter weights in place, between rounds; counts of accepted drafts are discounted."""
        assert self.drafter is not None and self._learned is not None
        self._finish_launched_rounds()
        self.drafter.load_state_dict(weights)
        self._learned.reset_read_positions(self._rows.responses)
        self._cache.clear(drafter_only=True)
        self._rounds.drafter_is_sound = True
        self._drafter_is_trained = trained
        self.chooser.acceptance.discount(0.5)

    def calibrate(self, requests: Sequence[Request]) -> None:
        """Prepare for the first rollout: capture graphs on a GPU, measure the tie guard's tolerance on real text.

        The text is that of responses that are discarded: the requests' keys must not be those of a rollout. Random
        tokens would not do: far from what a model was trained on, its activations and the error are larger.
        """
        assert not self.has_work and not self._guard.is_calibrated and requests
        if self.decoder.device.type == "cuda" and self._rounds.graphs:
            self._rounds.graphs.capture(self._make_sampling_rule(self.settings.params).truncates)
        if not self.settings.tie_guard:
            return
        uses_ngram, self._ngram.active, self._guard.active = self._ngram.active, False, False
        self.submit(requests)
        while self.has_work:
            self._admit_and_prefill_chunk()
            if self._rows.num_live:
                self._scheduler.reserve_pages_or_preempt(1)
                self._rounds.launch(RoundPlan(OFF))
                self._retire(self._rounds.finish_oldest_round())
        self._finished = []
        self._ngram.active, self._guard.active = uses_ngram, True
        self._guard.measure_on_longest_texts(NUM_PROBED)
        self.take_counts()

    # -- rounds -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Admit what fits, prefill a chunk, decode one round, retire what finished.

        On a device the round is launched and the one before it is read, so what finishes is known a step later.
        """
        had_work = self.has_work
        has_prefilled = self._admit_and_prefill_chunk()
        if self._rows.num_live:
            self._decode(has_prefilled)
        if had_work or not self.has_ahead_work:
            self._finish_rounds_at_end()

    def _admit_and_prefill_chunk(self) -> bool:
        """Admit sequences and read a chunk of their texts; returns whether there was one."""
        scheduler, max_tokens = self._scheduler, self.settings.prefill_tokens
        if not (self._num_own or scheduler.waiting):
            num_free = self._rows.capacity - self._rows.num_live - len(scheduler.prefilling)
            for response in self.ahead.take_next_responses(num_free, bool(self._rows.num_live or scheduler.prefilling)):
                scheduler.enqueue(response)
        scheduler.admit()
        if not self._num_own:
            max_tokens = self.ahead.prefill_tokens(max_tokens, bool(self._rows.num_live))
        num_prefilling, start = len(scheduler.prefilling), time.perf_counter()
        chunk = scheduler.plan_prefill_chunk(max_tokens)
        if chunk is None:
            return False
        self._rounds.target.prefill(chunk)
        num_read = chunk.num_read
        scheduler.finish_prefill_chunk(chunk)
        seconds = time.perf_counter() - start
        self.ahead.note_prefill(num_read, seconds)
        if self._num_own:
            self._counts.add_span(PREFILL, num_prefilling, num_read, seconds)
        return True

    def _decode(self, has_prefilled: bool) -> None:
        """Launch a round of the live rows, and read those before it."""
        scheduler, rounds, has_stored = self._scheduler, self._rounds, self._scheduler.has_stored
        if has_stored:  # the cursors need the texts
            self._finish_launched_rounds()
        start = time.perf_counter()
        if has_stored:
            scheduler.follow_stored_texts()
        if not self._rows.num_live:
            return
        strategy, depth = self._choose()
        overlaps = not has_stored and rounds.overlaps(strategy)
        prepared = time.perf_counter() - start
        if not overlaps:
            self._finish_launched_rounds()
        start = time.perf_counter()
        num_slots = max(strategy.num_slots, 1 + depth)
        self._counts.num_preempted += scheduler.reserve_pages_or_preempt(num_slots, rounds.tokens_in_flight)
        if not self._rows.num_live:  # all have ended, or were preempted for an earlier one that is being prefilled
            self._finish_launched_rounds()
            return
        prepared += time.perf_counter() - start
        assert all(one.is_ahead is not self.has_work for one in self._rows.responses), "rows of two kinds in a round"
        stored = scheduler.stored_texts() if depth else {}
        rounds.launch(RoundPlan(strategy, stored, depth, prepared, is_next=not has_prefilled))
        self._finish_launched_rounds(int(overlaps))

    def _choose(self) -> tuple[Strategy, int]:
        """The round's strategy, among those that have a sound drafter and need no preemption, and the most drafts of
        a stored text.
        """
        num_live, scheduler, in_flight = self._rows.num_live, self._scheduler, self._rounds.tokens_in_flight
        has_drafter = self._drafter_is_trained and self._rounds.drafter_is_sound
        has_room_for_all = scheduler.has_room(self.settings.max_slots, in_flight)
        usable = [
            strategy
            for strategy in self.settings.strategies
            if (has_drafter or not strategy.has_drafter)
            and (has_room_for_all or strategy == OFF or scheduler.has_room(strategy.num_slots, in_flight))
        ]
        stored = scheduler.stored_texts().values() if has_room_for_all else ()
        return self.chooser.choose(num_live, usable or [OFF], stored, self._max_stored_tokens)

    def _finish_launched_rounds(self, num_left: int = 0) -> None:
        """Read the launched rounds until ``num_left`` are left."""
        while self._rounds.num_in_flight > num_left:
            self._process_round(self._rounds.finish_oldest_round())
        self.outbox.deliver(wait=False)

    def _finish_rounds_at_end(self) -> None:
        """Read the last rounds and hand over all features, if the step's own requests have finished."""
        if not self.has_work:
            self._finish_launched_rounds()
            self.outbox.deliver(wait=True)

    def _process_round(self, result: RoundResult) -> None:
        """Learn from a round that has been read, and retire what it has finished."""
        start = time.perf_counter()
        result.cut_at_stops()
        if self._agree is not None:
            self.text_mark = zlib.crc32(repr(result.new_tokens()).encode(), self.text_mark)
        for response, count in zip(result.responses, result.num_tokens, strict=True):
            if count:
                response.pass_lengths.append(count)
        seconds = result.seconds + (0.0 if result.overlapped else time.perf_counter() - start)
        self.ahead.round_seconds = seconds
        self._counts.add_round(result, seconds)
        if result.is_measurement and (num_tokens := sum(result.num_tokens)):
            plan, num_live = result.plan, len(result.responses)
            if plan.stored:
                given = plan.strategy, seconds, result.accepted, plan.stored, plan.stored_depth
                self.chooser.observe_with_stored(*given, result.is_typical)
            else:
                of_round = plan.strategy, num_live, num_tokens, seconds, result.accepted
                self.chooser.observe(*of_round, result.is_typical)
        self._retire(result)

    def _retire(self, result: RoundResult) -> None:
        """Finish what has ended; the others keep the order of their rows as far as they can."""
        last_first = sorted(zip(result.responses, result.ended, strict=True), key=lambda pair: -pair[0].row)
        for response, has_ended in last_first:
            if (reason := response.finish_reason(has_ended)) is not None:
                self._finish(response, reason)

    def _finish(self, response: Response, reason: FinishReason) -> None:
        row = response.row
        if response.is_ahead:
            self.ahead.keep_text(response)
            self._scheduler.remove_row(row)
            return
        self._num_own -= 1
        response.stored = None
        log_probs = self._rows.response_log_probs(row).numpy().copy()
        if self._keeps(response.request.key):
            self._finished.append(response.to_rollout(reason, log_probs, self.decoder.version))
            self.outbox.start_copy_to_host(response)
        self._ngram.keep_finished_response(response)
        self._guard.note_finished_text(response.text)
        self._scheduler.remove_row(row)
