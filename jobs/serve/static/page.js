"use strict";
// Asks how the jobs of this page stand and puts their figures into it, text by text: focus and
// scrolling stay where they are. What changes seldom is said aloud.
(() => {
  const live = document.querySelector("[data-now]");
  const aloud = document.getElementById("said");
  const MOST_MS = 60000;
  const said = new Map();
  let failed = 0;
  let timer = 0;

  const within = (job, selector) => [
    ...(job.matches(selector) ? [job] : []),
    ...job.querySelectorAll(selector),
  ];

  const show = (one) => {
    const jobs = [live, ...live.querySelectorAll("[data-job]")];
    const job = jobs.find((element) => element.dataset.job === one.id);
    if (!job) return;
    for (const cell of within(job, "[data-cell]")) {
      const text = one.cells[cell.dataset.cell];
      if (text !== undefined && cell.textContent !== text) cell.textContent = text;
    }
    for (const bar of within(job, "progress[data-share]")) bar.value = one.share;
    for (const chip of within(job, "[data-tone]")) chip.className = `chip ${one.tone}`;
    if (said.has(one.id) && said.get(one.id) !== one.said) aloud.textContent = one.said;
    said.set(one.id, one.said);
    if (!one.live) reveal("[data-ended]");
  };

  const reveal = (selector) => {
    const line = live.querySelector(selector);
    if (line && line.hidden) line.hidden = false;
  };

  const ask = async () => {
    clearTimeout(timer);
    if (document.hidden) return;
    let again = 0;
    try {
      const answer = await fetch(live.dataset.now, { headers: { Accept: "application/json" } });
      if (answer.status === 401) return location.reload();
      if (!answer.ok) throw new Error(String(answer.status));
      const found = await answer.json();
      if (failed) aloud.textContent = "";
      failed = 0;
      found.jobs.forEach(show);
      if (found.newer) reveal("[data-newer]");
      again = found.again_ms;
    } catch {
      failed += 1;
      again = Math.min(MOST_MS, 2000 * 2 ** failed);
      if (failed === 2) aloud.textContent = "The service does not answer; it is asked again.";
    }
    timer = setTimeout(ask, again);
  };

  document.addEventListener("visibilitychange", () => document.hidden || ask());
  ask();
})();
