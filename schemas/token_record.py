"""The view `token_record`: one row per token of every completion, on both databases.

A token's `ticks` are its share of its pass's; the first token also has what is in no pass (reading
the prompt). So those of a completion's tokens add up to its own, to the last tick.
"""

from __future__ import annotations

from collections.abc import Iterator

from specbatch.schemas import months

# What `token_arrays.py` packs, as plain arrays.
_FUNCTIONS = {
    "specbatch_repeated(smallint[])": """
CREATE FUNCTION specbatch_repeated(packed smallint[]) RETURNS smallint[]
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
  code smallint;
  last smallint;
  found smallint[] := '{}';
BEGIN
  FOREACH code IN ARRAY packed LOOP
    IF code < 0 THEN
      found := found || array_fill(last, ARRAY[-code::integer]);
    ELSE
      found := found || code;
      last := code;
    END IF;
  END LOOP;
  RETURN found;
END $$""",
    "specbatch_origins(smallint[])": """
CREATE FUNCTION specbatch_origins(packed smallint[]) RETURNS smallint[]
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
  code smallint;
  found smallint[] := '{}';
BEGIN
  FOREACH code IN ARRAY specbatch_repeated(packed) LOOP
    IF code > 3 THEN
      found := found || array_fill(1::smallint, ARRAY[code >> 2]);
    END IF;
    found := found || (code & 3::smallint);
  END LOOP;
  RETURN found;
END $$""",
    "specbatch_steps(integer[])": """
CREATE FUNCTION specbatch_steps(packed integer[]) RETURNS integer[]
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
  SELECT coalesce(array_agg(packed[2 * pair - 1] + i ORDER BY pair, i), '{}')
  FROM generate_series(1, cardinality(packed) / 2) AS pair,
    generate_series(0, packed[2 * pair] - 1) AS i
$$""",
    "specbatch_numbers(smallint[])": """
CREATE FUNCTION specbatch_numbers(packed smallint[]) RETURNS bigint[]
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
  digit smallint;
  higher bigint := 0;
  found bigint[] := '{}';
BEGIN
  FOREACH digit IN ARRAY packed LOOP
    IF digit = -1 AND higher = 0 THEN
      found := found || -1::bigint;
    ELSIF digit < 0 THEN
      higher := (higher - 1 - digit) << 15;
    ELSE
      found := found || (higher + digit);
      higher := 0;
    END IF;
  END LOOP;
  RETURN found;
END $$""",
}

_TICKS = " + ".join(
    f"{kind}_ticks" for kind in ("prefill", "verify", "draft", "rejected", "padding", "overhead")
)

# Innermost: the tokens. Then the number of each one's pass, draft and correction; then its place in
# its pass.
_POSTGRES = f"""
CREATE VIEW token_record AS
SELECT c.job_id, c.row_index, c.sample_index, (t.n - 1)::integer AS position, t.token_id::integer,
  CASE {{reused}} WHEN t.origin = 0 THEN 'plain' WHEN t.origin = 1 THEN 'accepted'
    WHEN t.origin = 2 THEN 'corrected' ELSE 'bonus' END AS origin,
  CASE WHEN t.origin <> 0 THEN c.sources ->> coalesce(p.makers[t.draft], 0)::integer END
    AS proposer,
  p.steps[t.pass] AS verifier_step, t.logprob::double precision AS logprob,
  CASE WHEN t.origin IN (1, 2) THEN t.place END AS draft_position,
  CASE WHEN t.origin = 2 THEN p.rejected[t.correction]::integer END AS rejected_token,
  coalesce(p.ticks[t.pass], 0) / t.tokens
    + (t.place < mod(coalesce(p.ticks[t.pass], 0), t.tokens))::integer
    + CASE WHEN t.n = 1 THEN {_TICKS}
        - (SELECT coalesce(sum(of_pass), 0) FROM unnest(p.ticks) AS of_pass)::bigint ELSE 0 END
    AS ticks,
  c.price_microusd
FROM completions AS c
CROSS JOIN LATERAL (
  SELECT specbatch_steps(c.steps) AS steps, specbatch_numbers(c.pass_ticks) AS ticks,
    specbatch_repeated(c.makers) AS makers, specbatch_numbers(c.rejected) AS rejected
  OFFSET 0
) AS p
CROSS JOIN LATERAL (
  SELECT *, (row_number() OVER of_pass - 1)::integer AS place,
    count(*) OVER (PARTITION BY pass) AS tokens
  FROM (
    SELECT *,
      (1 + count(*) FILTER (WHERE origin <> 1) OVER before)::integer AS pass,
      (1 + count(*) FILTER (WHERE origin IN (2, 3)) OVER before)::integer AS draft,
      (1 + count(*) FILTER (WHERE origin = 2) OVER before)::integer AS correction
    FROM unnest(specbatch_numbers(c.token_ids), c.logprobs, specbatch_origins(c.origins))
      WITH ORDINALITY AS token (token_id, logprob, origin, n)
    WHERE token_id IS NOT NULL
    WINDOW before AS (ORDER BY n ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
  ) AS numbered
  WINDOW of_pass AS (PARTITION BY pass ORDER BY n)
) AS t"""

_SQLITE = f"""
CREATE VIEW token_record AS
SELECT job_id, row_index, sample_index, n AS position, token_id,
  CASE {{reused}} WHEN origin = 0 THEN 'plain' WHEN origin = 1 THEN 'accepted'
    WHEN origin = 2 THEN 'corrected' ELSE 'bonus' END AS origin,
  CASE WHEN origin <> 0 THEN json_extract(
    sources, '$[' || coalesce(json_extract(makers, '$[' || draft || ']'), 0) || ']'
  ) END AS proposer,
  json_extract(steps, '$[' || pass || ']') AS verifier_step, logprob,
  CASE WHEN origin IN (1, 2) THEN place END AS draft_position,
  CASE WHEN origin = 2 THEN json_extract(rejected, '$[' || correction || ']') END
    AS rejected_token,
  of_pass / tokens + (place < of_pass % tokens)
    + CASE WHEN n = 0 THEN all_ticks
        - (SELECT coalesce(sum(value), 0) FROM json_each(coalesce(pass_ticks, '[]'))) ELSE 0 END
    AS ticks,
  price_microusd
FROM (
  SELECT *, row_number() OVER of_pass - 1 AS place, count(*) OVER whole_pass AS tokens,
    coalesce(json_extract(pass_ticks, '$[' || pass || ']'), 0) AS of_pass
  FROM (
    SELECT *,
      count(*) FILTER (WHERE origin <> 1) OVER before AS pass,
      count(*) FILTER (WHERE origin IN (2, 3)) OVER before AS draft,
      count(*) FILTER (WHERE origin = 2) OVER before AS correction
    FROM (
      SELECT job_id, row_index, sample_index, sources, makers, steps, rejected, pass_ticks,
        {{column}} {_TICKS} AS all_ticks, price_microusd, token.key AS n, token.value AS token_id,
        json_extract(logprobs, '$[' || token.key || ']') AS logprob,
        json_extract(origins, '$[' || token.key || ']') AS origin
      FROM completions, json_each(completions.token_ids) AS token
    )
    WINDOW before AS (
      PARTITION BY job_id, row_index, sample_index ORDER BY n
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    )
  )
  WINDOW of_pass AS (PARTITION BY job_id, row_index, sample_index, pass ORDER BY n),
    whole_pass AS (PARTITION BY job_id, row_index, sample_index, pass)
)"""


def view(dialect: str, with_reuse: bool = True) -> str:
    """The statement that creates it. `with_reuse`: the table has the column `reused_from`."""
    copied = "c.reused_from" if dialect == "postgresql" else "reused_from"
    return (_POSTGRES if dialect == "postgresql" else _SQLITE).format(
        reused=f"WHEN {copied} IS NOT NULL THEN 'reused'" if with_reuse else "",
        column="reused_from," if with_reuse else "",
    )


def creating(dialect: str, with_reuse: bool = True) -> Iterator[str]:
    """Statements that create the views and functions on `completions`, which must exist."""
    if dialect == "postgresql":
        yield months.CREATE_DEFAULT
        yield months.CREATE_INDEX
        yield months.CREATE_FUNCTION
        yield months.REVOKE_FUNCTION
        yield from _FUNCTIONS.values()
    yield view(dialect, with_reuse)


def dropping(dialect: str) -> Iterator[str]:
    """The inverse of `creating`, to run before the table is dropped."""
    yield "DROP VIEW IF EXISTS token_record"
    if dialect == "postgresql":
        for name in _FUNCTIONS:
            yield f"DROP FUNCTION IF EXISTS {name}"
        yield months.DROP_FUNCTION
