"""Who drafts where several draft models are there: rows of a tag go where they are worth most.

A model that is not asked costs nothing: its KV is not kept in step, so it has to read what it
missed when its turn comes. That is counted against it, and keeps sequences where they are.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from operator import attrgetter

from specbatch.pipeline.engines.contract import Cohort
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.speculation.options import Option, candidates, model_of
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.policy import tuning
from specbatch.pipeline.policy.acceptance import Track
from specbatch.pipeline.policy.breaker import DecisionLog
from specbatch.pipeline.policy.depth import Controller
from specbatch.pipeline.policy.routing import (
    Price,
    fade,
    optimistic_rate,
    speedup,
    speedup_behind,
    teams,
)

_SCORE = attrgetter("score")

TrackOf = Callable[[Proposer, Sequence], Track]


class Router:
    """Chooses among the sources of a sequence. With one draft model: the best by score."""

    def __init__(self, proposers: Seq[Proposer], controller: Controller, track_of: TrackOf) -> None:
        self._models = {p.name: p for p in proposers if p.pass_time is not None}
        self._controller = controller
        self._track_of = track_of
        self._teams = teams(list(self._models))
        self._team: tuple[str, ...] = ()
        self._count = 1  # sequences in a step
        self._burdens: dict[str, float] = {}
        self._prices: dict[str, Price] = {}
        self._speedups: dict[tuple[str, float, int], float] = {}
        self._last: dict[Sequence, str] = {}  # the model that drafted last, trials apart
        self._held: dict[Sequence, set[str]] = {}  # models that hold KV of it
        self._routed: dict[Cohort, str] = {}  # the model that most rows of a tag go to
        self._asked_at: OrderedDict[tuple[Cohort, str], int] = OrderedDict()  # by step
        self._allowance = tuning.FIRST_MODEL_ALLOWANCE
        self._weighed_at = 0  # step

    @property
    def several(self) -> bool:
        return len(self._models) > 1

    # --- a replan --------------------------------------------------------------------------------
    def begin(self, count: int) -> None:
        """Prices as they are now, for steps of so many sequences."""
        self._burdens = {name: self._controller.burden(count, name) for name in self._models}
        if self.several:
            self._count = count
            self._prices = {name: self._controller.price(count, name) for name in self._models}
            self._speedups.clear()

    def burden(self, proposer: Proposer) -> float:
        """Price of a draft token, in tokens that depth 0 would decide meanwhile."""
        return self._burdens.get(proposer.name, 0.0)

    def pick(self, options: Seq[Seq[Option]], step: int) -> list[Option]:
        """One source for each sequence, of those it has; together the most tokens per second."""
        if not self.several:
            return [self.best(of_sequence) for of_sequence in options]
        found: dict[tuple[str, ...], tuple[float, list[Option]]] = {}
        seen = set()
        for team in sorted(self._teams, key=lambda t: t != self._team):
            picked = [self.best(of_sequence, team) for of_sequence in options]
            proposers = tuple(option.proposer.name for option in picked)
            if proposers not in seen:
                seen.add(proposers)
                found[team] = (self._promise(picked), picked)
        self._team = self._next_team({team: promise for team, (promise, _) in found.items()})
        picked = found[self._team][1]
        self._note_routes(picked, step)
        return picked

    def _next_team(self, promises: dict[tuple[str, ...], float]) -> tuple[str, ...]:
        """The best set of models. One that works is left only for one that is clearly better.

        Rates waver by some hundredths, and who followed each of them would move all the time.
        """
        best = max(promises, key=lambda team: promises[team])
        stays = tuning.TEAM_STAYS * promises.get(self._team, 0.0)
        return best if promises[best] > stays else self._team

    def best(self, options: Seq[Option], team: Seq[str] | None = None) -> Option:
        """The most promising source of one sequence; of models, the team's count where they may."""
        if len(options) == 1:
            return options[0]
        models = [w for w in options if w.model is not None] if self.several else []
        if len(models) < 2:
            return max(options, key=_SCORE)
        of_team = [w for w in models if team is None or w.proposer.name in team] or models
        model = max(of_team, key=self._speedup)
        return max((w for w in options if w.model is None or w is model), key=_SCORE)

    def trial(
        self, options: Seq[Seq[Option]], picked: Seq[Option], at_depth_0: bool, step: int
    ) -> list[Option]:
        """Sequences by which to find out what another model is worth for a tag; mostly none.

        Tried is where most may be gained, and only for what has been put aside.
        """
        earned = tuning.MODEL_ALLOWANCE * (step - self._weighed_at)
        self._allowance = min(self._allowance + earned, tuning.MOST_MODEL_ALLOWANCE)
        self._weighed_at = step
        if not self.several:
            return []
        best: tuple[float, Cohort, str] | None = None
        seen = set()
        for of_sequence, option in zip(options, picked, strict=True):
            route = option.sequence.request.route
            if route in seen:
                continue
            seen.add(route)
            beats = tuning.TEAM_STAYS * (
                1.0 if at_depth_0 else self._plain_speedup(option, option.rate)
            )
            for other in of_sequence:
                if other.model is None or other.proposer is option.proposer:
                    continue
                gain = self._plain_speedup(other, self._optimistic_rate(other, step)) / beats
                if gain > 1.0 and (best is None or gain > best[0]):
                    best = (gain, route, other.proposer.name)
        if best is None:
            return []
        _, route, name = best
        return self._afforded(_members(options, route, name), route, name, step)

    def record_routes(self, decision_log: DecisionLog, options: Seq[Seq[Option]]) -> None:
        """Record which model the rows of each tag go to, once enough tests say so."""
        recorded: set[Cohort] = set()
        for of_sequence in options if self.several else ():
            models = [option for option in of_sequence if option.model is not None]
            sequence = of_sequence[0].sequence
            route = sequence.request.route
            if len(models) < 2 or route in recorded or route not in self._routed:
                continue
            recorded.add(route)
            name = self._routed[route]
            if self._track_of(self._models[name], sequence).judged >= tuning.BREAKER_TESTS:
                reason = partial(self._reason, models, name)
                decision_log.record_route(route.job, route.tag, name, reason, self._count)

    def _reason(self, models: Seq[Option], name: str) -> str:
        tag = models[0].sequence.request.route.tag
        speedups = {
            option.proposer.name: self._plain_speedup(
                option, self._track_of(option.proposer, option.sequence).rate
            )
            for option in models
        }
        others = ", ".join(f"{p:.2f} by {other}" for other, p in speedups.items() if other != name)
        rows = "rows" if tag is None else f"rows tagged {tag}"
        return (
            f"{rows} go to {name}: in the time of a step at depth 0 its drafts promise "
            f"{speedups.get(name, 1.0):.2f} tokens, beside {others}, "
            f"with {self._count} sequences in a step"
        )

    # --- between replans ------------------------------------------------------------------------
    def instead(self, proposer: Proposer, sequence: Sequence) -> Proposer:
        """For a newcomer: the model that rows of its tag go to, if a model is to draft for it."""
        if not self.several or model_of(proposer) is None:
            return proposer
        return self._models[self._routed.get(sequence.request.route, proposer.name)]

    def suits(self, proposer: Proposer, sequence: Sequence) -> bool:
        """Whether it may stand in for a source that has nothing to say."""
        if not self.several or model_of(proposer) is None:
            return True
        if sequence in self._last:
            return self._last[sequence] == proposer.name
        return self._routed.get(sequence.request.route, proposer.name) == proposer.name

    def asked(self, proposer: Proposer, sequence: Sequence, in_trial: bool) -> None:
        """A sequence that is gone to another model for good leaves nothing with the former."""
        if not self.several or model_of(proposer) is None:
            return
        held = self._held.setdefault(sequence, set())
        held.add(proposer.name)
        if in_trial:
            return
        self._last[sequence] = proposer.name
        if len(held) > 1:
            for name in held - {proposer.name}:
                self._models[name].forget(sequence)
            self._held[sequence] = {proposer.name}

    def forget(self, sequence: Sequence) -> None:
        self._last.pop(sequence, None)
        self._held.pop(sequence, None)

    # --- worth -----------------------------------------------------------------------------------
    def _promise(self, picked: Seq[Option]) -> float:
        """Tokens per second of a step, with what models have to read first."""
        decision = self._controller.promise(candidates(picked), self._count - len(picked))
        per_sequence = decision.expected_tokens / self._count
        steps = sum(
            self._behind(option) * self._prices[option.model].row * per_sequence / _horizon(option)
            for option, depth in zip(picked, decision.depths, strict=True)
            if depth and option.model is not None
        )
        seconds = decision.expected_sec + steps * self._controller.plain_sec(self._count)
        return decision.expected_tokens / seconds

    def _speedup(self, option: Option) -> float:
        name = option.proposer.name
        found = speedup_behind(
            self._plain_speedup(option, option.rate),
            self._behind(option),
            self._prices[name],
            self._count,
            _horizon(option),
        )
        return found * tuning.MODEL_STAYS if self._last.get(option.sequence) == name else found

    def _plain_speedup(self, option: Option, rate: float) -> float:
        """Of a sequence that its model knows."""
        price = self._prices.get(option.proposer.name) or self._controller.price(self._count, None)
        key = (option.proposer.name, round(rate, 2), option.limit)
        if key not in self._speedups:
            self._speedups[key] = speedup(key[1], option.limit, price)
        return self._speedups[key]

    def _optimistic_rate(self, option: Option, step: int) -> float:
        idle = self._idle(option.sequence.request.route, option.proposer.name, step)
        return optimistic_rate(self._track_of(option.proposer, option.sequence), idle)

    def _afforded(self, members: list[Option], route: Cohort, name: str, step: int) -> list[Option]:
        price = self._prices[name]
        members.sort(key=self._behind)
        tried = members[: tuning.MODEL_TRIAL_SEQUENCES]
        fed = sum(self._behind(option) for option in tried)
        cost = (
            tuning.MODEL_TRIAL_STEPS * (price.call + tuning.MODEL_TRIAL_DEPTH * price.token)
            + fed * price.row
        )
        if cost > self._allowance:
            return []
        self._allowance -= cost
        idle = self._idle(route, name, step)
        for track in {self._track_of(option.proposer, option.sequence) for option in members}:
            fade(track, idle)  # else a trial changes nothing beside all that was found long ago
        self._note_asked(route, name, step)
        return tried

    def _behind(self, option: Option) -> int:
        return option.proposer.behind(option.sequence)

    def _idle(self, route: Cohort, name: str, step: int) -> int:
        """Steps since the model was asked for the route, or since somebody first thought of it."""
        if (route, name) not in self._asked_at:
            self._note_asked(route, name, step)
        return step - self._asked_at[route, name]

    def _note_asked(self, route: Cohort, name: str, step: int) -> None:
        self._asked_at[route, name] = step
        self._asked_at.move_to_end((route, name))
        while len(self._asked_at) > tuning.MOST_ASKED:
            self._asked_at.popitem(last=False)

    def _note_routes(self, picked: Seq[Option], step: int) -> None:
        counts: dict[Cohort, Counter[str]] = {}
        for option in picked:
            if option.model is not None:
                counts.setdefault(option.sequence.request.route, Counter())[option.model] += 1
        self._routed = {route: of.most_common(1)[0][0] for route, of in counts.items()}
        for route, of in counts.items():
            for name in of:
                self._note_asked(route, name, step)


def _members(options: Seq[Seq[Option]], route: Cohort, name: str) -> list[Option]:
    return [
        option
        for of_sequence in options
        for option in of_sequence
        if option.proposer.name == name and option.sequence.request.route == route
    ]


def _horizon(option: Option) -> int:
    return min(option.sequence.remaining, tuning.HORIZON_TOKENS)
