"""Sampled outputs token by token. Colour, underline and weight tell where each came from."""

from __future__ import annotations

from specbatch.pipeline.observe.report.facts import Facts, ShownOutput, ShownToken
from specbatch.pipeline.observe.report.markup import Html, join, tag
from specbatch.pipeline.observe.units import count, percent, plural, seconds
from specbatch.schemas.records import Origin

# One letter each, as there are thousands of them.
CLASSES = {Origin.ACCEPTED: "a", Origin.CORRECTED: "c", Origin.BONUS: "b", Origin.PLAIN: "p"}
NAMES = {
    Origin.ACCEPTED: ("accepted", "drafted, and what the verifier wanted"),
    Origin.CORRECTED: ("corrected", "the verifier's, in place of a refused draft token"),
    Origin.BONUS: ("bonus", "the verifier's, after a draft that was all accepted"),
    Origin.PLAIN: ("plain", "the verifier's, where nothing was drafted"),
}
_GONE = "▮"  # a token that is not kept, or has no text of its own
_BREAK = "⏎"


def legend() -> Html:
    """What the looks of tokens mean."""
    items = [
        tag("li", tag("span", name, class_=f"t {CLASSES[origin]}"), " ", meaning)
        for origin, (name, meaning) in NAMES.items()
    ]
    return tag("ul", items, class_="legend")


def outputs(facts: Facts) -> Html:
    """All sampled outputs, with the line that tells of the token that is pointed at."""
    return join(
        legend(),
        tag(
            "p",
            "Point at a token, tap it, or move with the arrow keys to see its log-probability: how "
            "likely the verifier held it to be.",
            class_="hint screen",
        ),
        [_output(output) for output in facts.samples],
        tag("div", id="tip", class_="screen", role="status", hidden=True),
    )


def _output(output: ShownOutput) -> Html:
    name = f"Row {count(output.row)}" + (f", sample {output.sample}" if output.sample else "")
    told = [plural(output.all_tokens, "token"), plural(output.passes, "pass", "passes")]
    if output.proposed:
        told.append(f"{percent(output.accepted / output.proposed)} of the draft accepted")
    told += [seconds(output.sec), f"ended by {output.finish_reason}"]
    if output.tag:
        told.insert(0, f"tag {output.tag}")
    heading = tag("h3", name, output.row_id and tag("bdi", tag("code", output.row_id, class_="id")))
    prompt = output.prompt and tag(
        "p", tag("span", "Prompt", class_="label"), tag("bdi", output.prompt, class_="text"),
        class_="prompt",
    )  # fmt: skip
    left = output.all_tokens - len(output.tokens)
    return tag(
        "article",
        heading,
        tag("p", " · ".join(told), class_="meta"),
        prompt,
        tag(
            "p", [_token(token) for token in output.tokens],
            class_="tokens text", tabindex="0", role="group", dir="auto",
            aria_label=f"output of row {output.row}, token by token",
        ),
        tag("p", f"… and {plural(left, 'more token')}", class_="meta") if left else None,
        class_="output",
    )  # fmt: skip


def _token(token: ShownToken) -> Html:
    text = token.text
    is_gone = text is None
    if not text:
        text = _GONE
    elif text.endswith("\n"):  # else the end of a line could not be pointed at
        text = text[:-1] + _BREAK + "\n"
    logprob = None if token.logprob is None else f"{token.logprob:.3g}"
    class_ = f"t {CLASSES[token.origin]}" + (" g" if is_gone else "")
    return tag("span", text, class_=class_, data_l=logprob)
