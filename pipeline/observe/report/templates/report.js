"use strict";
(() => {
  const tip = document.getElementById("tip");
  if (!tip) return;
  const names = { a: "accepted", c: "corrected", b: "bonus", p: "plain" };
  let current = null;

  const hide = () => {
    if (current) current.classList.remove("on");
    current = null;
    tip.hidden = true;
  };

  const show = (token) => {
    if (current) current.classList.remove("on");
    current = token;
    token.classList.add("on");
    const place = Array.prototype.indexOf.call(token.parentNode.children, token) + 1;
    const kind = [...token.classList].map((name) => names[name]).find(Boolean);
    const head = document.createElement("b");
    const text = token.classList.contains("g") ? "not kept" : JSON.stringify(token.textContent);
    head.textContent = `token ${place}: ${kind}`;
    let said = text;
    if (token.dataset.l !== undefined) {
      const logprob = Number(token.dataset.l);
      const chance = 100 * Math.exp(logprob);
      const shown = chance >= 0.1 ? chance.toFixed(1) : chance.toPrecision(2);
      said += ` · log-probability ${token.dataset.l.replace("-", "\u2212")} (${shown} %)`;
    }
    tip.replaceChildren(head, said);
    tip.hidden = false;
    move();
  };

  const move = () => {
    const token = current;
    const box = token.getClientRects()[0] || token.getBoundingClientRect();
    const wide = tip.offsetWidth;
    const left = Math.min(Math.max(8, box.left), document.documentElement.clientWidth - wide - 8);
    const above = box.top - tip.offsetHeight - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 4 ? above : box.bottom + 8}px`;
  };

  for (const output of document.querySelectorAll(".tokens")) {
    const tokens = output.children;
    const at = (event) => event.target.closest(".tokens > .t");
    output.addEventListener("pointerover", (event) => at(event) && show(at(event)));
    output.addEventListener("click", (event) => at(event) && show(at(event)));
    output.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
    output.addEventListener("blur", hide);
    output.addEventListener("keydown", (event) => {
      const here = Array.prototype.indexOf.call(tokens, current);
      const next = {
        ArrowRight: here + 1,
        ArrowLeft: here - 1,
        Home: 0,
        End: tokens.length - 1,
      }[event.key];
      if (event.key === "Escape") hide();
      if (next === undefined || !tokens.length) return;
      event.preventDefault();
      const token = tokens[Math.min(Math.max(next, 0), tokens.length - 1)];
      token.scrollIntoView({ block: "nearest", behavior: "instant" });
      show(token);
    });
  }
  const follow = () => current && (current.parentNode.matches(":focus") ? move() : hide());
  addEventListener("scroll", follow, { passive: true });
  addEventListener("resize", hide);
})();
