"""How many draft tokens each sequence may have verified in the next steps.

    a     probability that a draft token is accepted, given its predecessors were
    a^j   worth of the j-th draft token of a sequence, in tokens
    E/T   expected tokens over expected seconds of the whole step: what is maximised

Every step yields one token per sequence for the price of a pass without drafts. As worths fall
with j, the best k draft tokens of a step are the first k of all, sorted by worth; only k is to be
chosen, and every k is tried, so the price of a pass may have any shape. A draft model's tokens
also cost its passes, which the sequences of a batch share: every number of passes is tried. Depth 0
needs no case of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from specbatch.pipeline.policy import tuning
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.pipeline.policy.routing import Price


@dataclass(frozen=True, slots=True)
class Candidate:
    """One sequence that could be drafted for."""

    limit: int  # draft tokens that exist or may be made
    acceptance: float
    model: str | None = None  # the draft model that would make them; None: they cost nothing


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds. `verify_sec[k]` is the verifier's pass with k draft tokens in it."""

    verify_sec: NDArray[np.float64]
    draft_call_sec: float = 0.0  # asking the draft model at all
    draft_pass_sec: float = 0.0  # one pass of it over the batch
    draft_row_sec: float = 0.0  # one token in such a pass

    @property
    def most(self) -> int:
        return len(self.verify_sec) - 1


@dataclass(frozen=True, slots=True)
class DepthDecision:
    """Draft tokens per candidate, and what the step is expected to bring."""

    depths: tuple[int, ...]
    expected_tokens: float
    expected_sec: float
    least_worth: float = 1.0  # of the draft tokens taken: what one must be worth to be verified

    @property
    def tokens_per_sec(self) -> float:
        return self.expected_tokens / self.expected_sec


def choose_depths(
    candidates: Sequence[Candidate], cost: StepCost, others: float = 0
) -> DepthDecision:
    """The depths of highest expected tokens per second, at most `cost.most` in all.

    `others` tokens come of the step whatever is chosen. All draft models among the candidates
    count as one: the price of a pass is `cost`'s.
    """
    limits = np.array([c.limit for c in candidates], dtype=np.int64)
    rates = np.clip([c.acceptance for c in candidates], 0.0, tuning.SURE_RATE)
    modelled = np.array([c.model is not None for c in candidates], dtype=bool)
    count, depth = len(limits), int(limits.max(initial=0))
    # 1) All draft tokens there are, by falling worth. A token of the draft model has a price of its
    #    own on top of being verified, and stands behind a free one of equal worth.
    worth = np.repeat(rates[:, None], depth, axis=1).cumprod(axis=1)
    worth[np.arange(depth) >= limits[:, None]] = 0.0
    net = worth / (1.0 + _relative(cost) * modelled)[:, None] if modelled.any() else worth
    order = np.argsort(-net, axis=None, kind="stable")
    order = order[: int(np.count_nonzero(worth > 0.0))]
    worth = worth.ravel()[order]
    owners, positions = np.divmod(order, max(depth, 1))
    of_model = modelled[owners]
    # 2) The best number of them, for every number of passes of the draft model.
    passes = min(int(limits[modelled].max(initial=0)), tuning.MAX_PASSES)
    best = (count + others + 0.0, float(cost.verify_sec[0]), owners[:0], 1.0)
    for k in range(passes + 1):
        kept = slice(None) if not passes else np.flatnonzero(~of_model | (positions < k))
        gains = worth[kept][: cost.most]
        tokens = np.cumsum(gains) + (count + others)
        seconds = cost.verify_sec[1 : len(tokens) + 1]
        if k:
            own = np.cumsum(of_model[kept][: cost.most]) * cost.draft_row_sec
            seconds = seconds + own + (cost.draft_call_sec + k * cost.draft_pass_sec)
        if not len(tokens):
            continue
        at = int(np.argmax(tokens / seconds))
        if tokens[at] * best[1] > best[0] * seconds[at]:
            best = (float(tokens[at]), float(seconds[at]), owners[kept][: at + 1], float(gains[at]))
    depths = np.bincount(best[2], minlength=count)
    return DepthDecision(tuple(depths.tolist()), best[0], best[1], best[3])


def _relative(cost: StepCost) -> float:
    """Price of a draft model's token beside that of verifying one."""
    if cost.most < 1 or not cost.draft_row_sec:
        return 0.0
    row = (cost.verify_sec[-1] - cost.verify_sec[0]) / cost.most
    return float(cost.draft_row_sec / max(row, 1e-12))


def break_even(cost: StepCost, sequences: int, of_model: bool, margin: float = 1.0) -> float:
    """The acceptance, alike for all sequences, from which on drafting pays; above 1: it cannot.

    It pays where it brings `margin` times the tokens per second of depth 0. Tried are one token for
    some of the sequences, and up to `MAX_PASSES` for all of them.
    """
    plain = float(cost.verify_sec[0]) / margin
    found = np.inf
    some = np.arange(1, min(sequences, cost.most) + 1)
    if len(some):
        seconds = cost.verify_sec[some] + _drafting(cost, some, 1.0, of_model)
        found = float(((seconds / plain - 1.0) * sequences / some).min())
    for depth in range(2, min(tuning.MAX_PASSES, cost.most // max(sequences, 1)) + 1):
        tokens = np.array([depth * sequences])
        seconds = cost.verify_sec[tokens] + _drafting(cost, tokens, depth, of_model)
        needed = float(seconds[0]) / plain - 1.0  # a + a^2 + … must bring so much
        if needed < depth:
            roots = np.roots([*([1.0] * depth), -needed])
            real = roots[(abs(roots.imag) < 1e-9) & (roots.real >= 0)].real
            found = min(found, float(real.min(initial=np.inf)))
    return max(found, 0.0)


def _drafting(
    cost: StepCost, tokens: NDArray[np.int64], passes: float, of_model: bool
) -> NDArray[np.float64]:
    if not of_model:
        return np.zeros(len(tokens))
    rows = tokens.astype(np.float64) * cost.draft_row_sec
    return rows + (cost.draft_call_sec + passes * cost.draft_pass_sec)


# --- replanning ---------------------------------------------------------------------------------
# Most replans take what is known to be best. Some try a size that nobody has seen and that could be
# better, for a few steps only, and for a small share of the time at most: a machine's steps are
# not found by standing still. While drafting does not pay, a few sequences are drafted for by one
# token now and then, to notice when it would. The more a replan costs beside a step, the longer its
# choice holds, so that replanning takes a small share of the time too.


@dataclass(frozen=True, slots=True)
class DepthSchedule:
    """Draft tokens per candidate, for so many steps; the first few of them may try other depths."""

    depths: tuple[int, ...]
    steps: int
    least_worth: float = 1.0  # what a draft token must be worth to be verified, in tokens
    weighed: bool = False  # all that is known was weighed: it shows whether drafts pay
    gain: float = 1.0  # tokens per second expected, over depth 0's
    opening: tuple[int, ...] | None = None  # depths of the first steps, where some are tried
    opening_steps: int = 0

    @property
    def at_depth_0(self) -> bool:
        """Whether nothing is drafted, but for what is tried."""
        return not any(self.depths)

    def control_every(self, passes: int) -> int:
        """One step in so many begins to go at depth 0, by chance: the more, the less is lost by it.
        `passes`: of the control and of what settles before it."""
        least, most = tuning.CONTROL_EVERY_STEPS
        if not self.weighed:
            return most
        return int(min(max((self.gain - 1.0) * passes / tuning.CONTROL_SHARE, least), most))

    def opened(self, depths: tuple[int, ...], steps: int) -> DepthSchedule:
        """The same schedule behind so many steps of other depths."""
        steps_in_all = max(self.steps, steps)
        return replace(self, steps=steps_in_all, opening=depths, opening_steps=steps)


@dataclass(slots=True)
class Controller:
    """Depths by marginal gain, from what is known of the machine and the drafts."""

    knowledge: Knowledge = field(default_factory=Knowledge)
    replans: int = 0
    replan_sec: float = 0.0  # what a replan takes on average: see `replanned`
    _drafting: bool = False
    _put_aside: float = 0.0  # seconds that trials may lose
    _untried: int = 0  # steps since those who are not drafted for were tried
    _turn: int = 0

    def __post_init__(self) -> None:
        if self.knowledge.step_time.observations < tuning.WELL_KNOWN_PASSES:
            self._put_aside = tuning.FIRST_EXPLORE_SEC

    def replan(
        self, candidates: Sequence[Candidate], others: int = 0, explores: bool = True
    ) -> DepthSchedule:
        """A schedule for the candidates; `others` take part in every step whatever is chosen.

        Without `explores` no size is tried that nobody has seen, and nothing is spent on it.
        """
        self.replans += 1
        if not candidates:
            return DepthSchedule((), tuning.HOLD_STEPS)
        if not self.knowledge.step_time.has_slope:
            depth = tuning.FIRST_DEPTHS[self.replans % len(tuning.FIRST_DEPTHS)]
            return DepthSchedule(tuple(min(c.limit, depth) for c in candidates), 1)
        decision, off = self._decide(candidates, others, optimism=0.0)
        stand = self._hold_steps(decision.expected_sec)
        self._put_aside += tuning.EXPLORE_SHARE * stand * decision.expected_sec
        schedule = self._best_known(decision, off, stand)
        if explores and self.replans % tuning.EXPLORE_EVERY_REPLANS == 0:
            trial = self._optimistic(candidates, others, sum(decision.depths))
            best = max(decision.tokens_per_sec, off)
            if self._may_be_tried(trial, best, len(candidates) + others):
                return schedule.opened(trial.depths, tuning.EXPLORE_STEPS)
        return schedule

    def replanned(self, seconds: float) -> None:
        """What the last replan took, with all that was asked for it."""
        share = 0.2 if self.replan_sec else 1.0
        self.replan_sec += share * (
            min(seconds, 4.0 * (self.replan_sec or seconds)) - self.replan_sec
        )

    def break_even(self, sequences: int, model: str | None) -> float:
        """The acceptance from which on drafts of a kind would pay in steps of so many sequences."""
        most = min(tuning.MAX_DRAFT_TOKENS, tuning.MAX_PASSES * sequences)
        curve = self.knowledge.step_time.curve(sequences, sequences, sequences + most)
        return break_even(self._cost(curve, model), sequences, model is not None, tuning.HYSTERESIS)

    def burden(self, sequences: int, model: str) -> float:
        """Price of one drafted token of a model, in tokens that depth 0 would decide meanwhile."""
        _, per_pass, row = self._draft_weights(model)
        plain = self.knowledge.step_time.curve(sequences, sequences, sequences)[0]
        return float((per_pass + sequences * row) / plain)

    def price(self, sequences: int, model: str | None) -> Price:
        """What drafts for all of so many sequences cost; of no model: verifying them alone."""
        curve = self.knowledge.step_time.curve(sequences, sequences, 2 * sequences)
        plain, verifying = float(curve[0]), float(curve[-1] - curve[0])
        if model is None:
            return Price(0.0, verifying / plain, 0.0)
        call, per_pass, row = self._draft_weights(model)
        token = per_pass + sequences * row + verifying
        return Price(call / plain, token / plain, row / plain)

    def token_sec(self, model: str, sequences: int, passes: int) -> float:
        """Price of one drafted token of a model, as it was last learned.

        What it costs to ask the model is shared by all the sequences that any model drafts for in
        the step: a model that drafts for few of them does not bear it alone.
        """
        call, per_pass, row = self.knowledge.draft_time_of(model).weights
        return (call / passes + per_pass) / sequences + row

    def plain_sec(self, sequences: int) -> float:
        """Seconds of a step of depth 0."""
        return float(self.knowledge.step_time.curve(sequences, sequences, sequences)[0])

    def settling_steps(self, sequences: int) -> int:
        """At depth 0, before a step of so many sequences is as if nothing had been drafted."""
        steps = math.ceil(tuning.SETTLING_SEC / self.plain_sec(sequences))
        return min(max(steps, 1), tuning.MOST_SETTLING_STEPS)

    def promise(self, candidates: Sequence[Candidate], others: int = 0) -> DepthDecision:
        """The best that is known to be had of candidates; nothing is decided by it."""
        return self._decide(candidates, others, optimism=0.0)[0]

    def _best_known(self, decision: DepthDecision, off: float, stand: int) -> DepthSchedule:
        """What is known to be best, and now and then a draft for those who are not drafted for."""
        gain = decision.tokens_per_sec / off
        self._drafting = gain > (1.0 if self._drafting else tuning.HYSTERESIS)
        if not self._drafting:
            rest = DepthSchedule((0,) * len(decision.depths), stand, weighed=True)
            return self._tried_now_and_then(rest, tuning.TRY_EVERY_STEPS)
        schedule = DepthSchedule(decision.depths, stand, decision.least_worth, True, gain)
        return self._tried_now_and_then(schedule, max(tuning.TRY_EVERY_STEPS, 2 * stand))

    def _tried_now_and_then(self, schedule: DepthSchedule, every: int) -> DepthSchedule:
        """Of those at depth 0, one in so many is tried in a step in so many."""
        left_out = [i for i, depth in enumerate(schedule.depths) if not depth]
        if not left_out:
            return schedule
        if self._untried < every:
            self._untried += schedule.steps
            return schedule
        self._untried = schedule.steps
        self._turn += 1
        share = min(tuning.TRIED_SHARE, len(left_out))
        depths = list(schedule.depths)
        for i in left_out[-self._turn % share :: share]:
            depths[i] = 1
        return schedule.opened(tuple(depths), 1)

    def _hold_steps(self, step_sec: float) -> int:
        steps = self.replan_sec / (tuning.REPLAN_SHARE * step_sec)
        return int(min(max(steps, tuning.HOLD_STEPS), tuning.LONGEST_HOLD_STEPS))

    def _optimistic(
        self, candidates: Sequence[Candidate], others: int, chosen: int
    ) -> DepthDecision:
        """What may be better than `chosen` draft tokens: halfway to an optimist's best.

        Half of what is unknown is known after it, whatever it shows.
        """
        trial, _ = self._decide(candidates, others, optimism=1.0)
        far = sum(trial.depths)
        if far - chosen < 2:
            return trial
        nearer, _ = self._decide(candidates, others, 1.0, most=(chosen + far) // 2)
        count = len(candidates) + others
        known = self.knowledge.step_time.knows(count + sum(nearer.depths), count)
        return trial if known else nearer

    def _may_be_tried(self, trial: DepthDecision, best: float, count: int) -> bool:
        """Whether its size is unknown, and what the trial may lose has been put aside."""
        step_time, tokens = self.knowledge.step_time, count + sum(trial.depths)
        if step_time.knows(tokens, count):
            return False
        guessed, likely = (float(step_time.curve(tokens, count, tokens, o)[0]) for o in (1.0, 0.0))
        seconds = trial.expected_sec - guessed + likely
        loss = tuning.EXPLORE_STEPS * (seconds - trial.expected_tokens / best)
        if loss > self._put_aside:
            return False
        self._put_aside -= max(loss, 0.0)
        return True

    def _decide(
        self,
        candidates: Sequence[Candidate],
        others: int,
        optimism: float,
        most: int | None = None,
    ) -> tuple[DepthDecision, float]:
        """The best depths, and the tokens per second of depth 0."""
        count = len(candidates) + others
        if most is None:
            most = min(tuning.MAX_DRAFT_TOKENS, sum(c.limit for c in candidates))
        curve = self.knowledge.step_time.curve(count, count, count + most, optimism)
        models = Counter(c.model for c in candidates if c.model is not None).most_common()
        main = models[0][0] if models else None
        if len(models) <= 1:
            cost = self._cost(curve, main)
            return choose_depths(candidates, cost, others), count / float(curve[0])
        # The most common model and the free drafts first; each further model with what is left.
        depths = [0] * len(candidates)
        tokens, seconds, worth, taken = float(count), float(curve[0]), 1.0, 0
        for model, _ in models:
            own = [
                i
                for i, c in enumerate(candidates)
                if c.model == model or (c.model is None and model == main)
            ]
            part = [candidates[i] for i in own]
            rest = curve[taken:] + (seconds - float(curve[taken]))
            found = choose_depths(part, self._cost(rest, model), tokens - len(part))
            for i, depth in zip(own, found.depths, strict=True):
                depths[i] = depth
            taken += sum(found.depths)
            tokens, seconds = found.expected_tokens, found.expected_sec
            worth = min(worth, found.least_worth)
        return DepthDecision(tuple(depths), tokens, seconds, worth), count / float(curve[0])

    def _cost(self, verify_sec: NDArray[np.float64], model: str | None) -> StepCost:
        if model is None:
            return StepCost(verify_sec)
        return StepCost(verify_sec, *self._draft_weights(model))

    def _draft_weights(self, model: str) -> tuple[float, float, float]:
        known = self.knowledge.draft_time_of(model)
        known.solve()
        call, per_pass, row = known.weights
        return call, per_pass, row


# --- limits -------------------------------------------------------------------------------------


def depth_cap(
    *,
    tenant: int | None,
    job: int | None,
    tags: Mapping[str, int],
    tag: str | None,
    by_prompt_tokens: Sequence[tuple[int, int]],
    prompt_tokens: int,
) -> int | None:
    """Draft tokens per step at most; None: no cap, 0: the route is not drafted for.

    `by_prompt_tokens`: (prompts from so many tokens on, cap) pairs, in any order. A long
    context's KV is read again for every block of draft tokens, so outputs that grow so long are
    capped alike: see `Request.context_depths`.
    """
    caps = [cap for least, cap in by_prompt_tokens if prompt_tokens >= least]
    if tag is not None and tag in tags:
        caps.append(tags[tag])
    caps += [cap for cap in (tenant, job) if cap is not None]
    return min(caps, default=None)


# --- blocks that are drafted ahead --------------------------------------------------------------
# A block token at position L is useful if the block is still followed there and the verifier
# agrees. After a disagreement the block is mostly found again; otherwise it is lost:
#
#     P(used at L) = (1 − (1 − a) · lost)^L · a       a: acceptance of block tokens
#
# Drafting further ahead pays while that exceeds the price of a drafted token in verified ones.


def block_length(acceptance: float, tested: float, most: int, price: float | None = None) -> int:
    """Tokens to write ahead, at most `most`; 0: none are worth it.

    `acceptance` of block tokens on this job, measured over `tested` of them; `price` of a drafted
    token beside a verified one, as of now.
    """
    if tested < tuning.BLOCK_TESTS:
        return min(tuning.PILOT_TOKENS, max(tuning.SHORTEST_BLOCK, most // 4), most)
    price = tuning.USUAL_DRAFT_PRICE if price is None else price
    if acceptance <= price:
        return 0
    kept = 1.0 - (1.0 - min(acceptance, 1.0)) * tuning.LOST_SHARE
    if kept >= 1.0 or price <= 0.0:
        return most
    length = int(math.log(price / acceptance) / math.log(kept))
    return 0 if length < tuning.SHORTEST_BLOCK else min(length, most)
