"""The constants of choosing drafts and depths, with units and reasons.

A test is one draft token that was verified: accepted, or the first one refused. What each mechanism
is worth, and which others were removed because they were worth less, is in `benchmarks/NOTES.md`.
"""

from __future__ import annotations

# --- acceptance -------------------------------------------------------------------------------
LEVEL_DECAY = 0.995  # per test: about the last two hundred tests of all sequences count
LEVEL_WEIGHT = 12.0  # tests that the more general level counts for
FRESH_TESTS = 16  # on a job, before what happened on other jobs may speak against a proposer …
FRESH_RATE = 0.6  # … which is believed to have at least this acceptance until then
OPTIMISM_TESTS = 64  # on a job, before a proposer is believed to be no better than it was
HALF_OPEN_TESTS = 4.0  # that old results count for once a circuit breaker half-opens
PRIOR_TESTS = 200.0  # that earlier jobs of the same name may count for
SEQUENCE_WEIGHT = 16.0  # tests that all sequences' rate counts for, until their spread is known …
LEAST_SEQUENCE_WEIGHT = 2.0  # … and the least …
MOST_SEQUENCE_WEIGHT = 400.0  # … and most that it may count for afterwards
RECORD_TESTS = 32  # of one sequence: fewer lie within one passage and say nothing of the next
LEAST_RECORD_TESTS = 8  # a record of fewer is not compared
LEAST_VARIANCE = 1e-3  # of a test: no draft is certain
RECORD_PAIRS = 96  # pairs of records that an estimate of the spread rests on at most …
LEAST_RECORD_PAIRS = 12  # … and at least
ESTIMATE_EVERY_PAIRS = 8  # new pairs between two estimates

# --- cost of a draft model's call ---------------------------------------------------------------
RIDGE = 1e-3  # of a size's mean square: the pull towards the first guess
DRAFT_CLIP = 4.0  # times the expectation, above which a call counts as this: the system slept …
DRAFT_TRUST_AFTER = 16  # … once so many calls are known
DRAFT_READ_AT_ONCE = 16  # calls between two fits: a fit takes as long as a small model's pass

# --- cost of a verifier's pass ------------------------------------------------------------------
CELL_MEMORY = 512  # passes that the mean price of a size reaches back
CELL_SURE = 3  # passes, after which the mean price of a size stands for itself
CELL_KNOWN = 48  # passes, after which a size needs no more trials …
CELL_STALE = 8000  # … until so many passes of other sizes have gone by: it may have been bad luck
PASS_CLIP = 1.12  # times the mean, above which a pass counts as this: others used the machine
DRIFT_MEMORY = 32  # passes of which the machine's drift is the mean: it may change in a second
DRIFT_AFTER = 64  # passes of a size, before drift is read off it
LEAST_DRIFT = 0.03  # the smallest drift that is believed, beyond what noise alone …
NOISE_DRIFT = 0.5  # … makes of that mean, which is so many times as much …
MOST_DRIFT = 0.075  # … but no more than this: drift itself looks like noise at first
NOISE_MEMORY = 128  # passes that the noise reaches back
SLOPE_PASSES = 3  # passes with drafts, before the price of a token is known
PASS_GUESS_SEC = (2e-3, 5e-5, 1e-6)  # of a pass, a token, a sequence, while nothing is known
CURVE_FRESH = 16  # passes for which a price curve that was drawn still holds
LINE_FRESH = 128  # passes for which the line through all sizes still holds
CURVES_KEPT = 64
STALE_OPTIMISM = 0.25  # of a stale price, that may not be there any more
BEYOND_OPTIMISM = 0.5  # of the line's rise beyond all sizes seen, that may not be there

# --- passes without drafts -----------------------------------------------------------------------
PASSES_AT_ONCE = 8  # in one call, so that Python's part of each is an eighth
WHOLE_PASSES = 0.75  # of its sequences that such a call must hold, on average, to tell a price
SEVERAL_SEC = 0.1  # that such a call may take: requests and cancellations wait for it

# --- depth --------------------------------------------------------------------------------------
MAX_DEPTH = 16  # draft tokens per sequence and step: hardly any deeper one is worth its price
MAX_DRAFT_TOKENS = 1024  # per step
MAX_PASSES = 8  # of a draft model in one step
SURE_RATE = 0.999  # acceptance from which every depth is worth it
HYSTERESIS = 1.015  # times depth 0's tokens per second that drafting must promise to be taken up
CLEARLY_BETTER = 0.05  # acceptance above the chosen ones' by which a free draft takes their place

# --- replanning ---------------------------------------------------------------------------------
REPLAN_SHARE = 0.002  # of the time may go into replanning
HOLD_STEPS = 16  # that a choice holds at least …
LONGEST_HOLD_STEPS = 384  # … and at most, however dear replanning is
SAMPLE_SHARE = 8  # at depth 0 most replans look at one sequence in so many …
FULL_EVERY_REPLANS = 4  # … and one in so many at all of them
FIRST_DEPTHS = (0, 0, 3, 1, 3)  # of a new engine's first steps: they show what a token costs

# --- trials -------------------------------------------------------------------------------------
EXPLORE_EVERY_REPLANS = 3  # replans, of which one may try a size that nobody has seen …
EXPLORE_STEPS = 3  # … for so many steps
EXPLORE_SHARE = 0.008  # of all time may be lost in such trials …
FIRST_EXPLORE_SEC = 0.05  # … and so much at the beginning, when everything is unknown …
WELL_KNOWN_PASSES = 1000  # … which is over after so many
TRY_EVERY_STEPS = 64  # sequences that are not drafted for are tried by one token …
TRIED_SHARE = 8  # … one of so many at a time

# --- controls -----------------------------------------------------------------------------------
CONTROL_SHARE = 0.005  # of the time may be lost by steps at depth 0 while drafting pays …
CONTROL_EVERY_STEPS = (16, 192)  # … and more, where one in the most steps takes more than that
FIRST_CONTROL_EVERY = 16  # steps, while the price of depth 0 is not known at all
SETTLING_SEC = 0.002  # at depth 0 before a control: by then what drafts left in caches has gone
MOST_SETTLING_STEPS = 6

# --- circuit breaker and decisions --------------------------------------------------------------
STRIKES = 3  # replans in a row at which a proposer's drafts did not pay, until it is disabled …
FIRST_OPEN_STEPS = 256  # … for so many steps, and twice as long each time …
LONGEST_OPEN_STEPS = 8192  # … up to so many
BREAKER_TESTS = 24  # of a proposer on a job, before it may be disabled
COLLAPSED_SHARE = 0.5  # of the best acceptance on a job: what is lower at `STRIKES` replans …
COLLAPSED_BY = 0.25  # … by so much or more has collapsed
REST_SHARE = 0.005  # of the time may go into samples of proposers that are disabled
SAME_TESTS_STEPS = 128  # for which replans at the same tests are one: trials are rarer than replans
SETTLED_REPLANS = 2  # in a row that must agree, before a change is recorded as a decision
MOST_DECISIONS = 200  # of a job, kept until they are asked for
MOST_JOBS = 64  # whose decisions are kept

# --- several draft models -----------------------------------------------------------------------
MOST_TEAMED = 4  # models of which every combination is weighed
HORIZON_TOKENS = 128  # a sequence is taken to stay with a model for so many, or to its end
MODEL_STAYS = 1.03  # times the speed-up another model must promise, beside the last one's …
TEAM_STAYS = 1.02  # … and another set of models, beside the one that works now
ROUTE_OPTIMISM = 1.5  # standard deviations above its rate that a model may turn out to have
ROUTE_FADE_STEPS = 4096  # in which half of what is known of an unused model is forgotten
MODEL_TRIAL_STEPS = 3
MODEL_TRIAL_DEPTH = 3
MODEL_TRIAL_SEQUENCES = 8
MODEL_ALLOWANCE = 0.005  # of all steps may go into trials of models that are not used …
FIRST_MODEL_ALLOWANCE = 16.0  # … and so many at the beginning …
MOST_MODEL_ALLOWANCE = 64.0  # … and in one go
MOST_ASKED = 4096  # routes and models of which it is known when they were asked

# --- blocks that are drafted ahead --------------------------------------------------------------
PILOT_TOKENS = 16  # of a block, while nothing is known; at most a quarter of a completion
BLOCK_TESTS = 64  # block tokens verified, before their acceptance is believed
USUAL_DRAFT_PRICE = 0.25  # of a drafted token in verified ones, while it is not measured
LOST_SHARE = 0.25  # of disagreements, after which a block is not found again
SHORTEST_BLOCK = 4  # tokens: shorter ones are not worth their trip through the queue
