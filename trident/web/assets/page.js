/* The page's own script: the theme, looks at the ledger that pause, keys, charts. All of the page works without it, too. */
"use strict";
(function () {
  const body = document.body;
  const find = (selector, within) => (within || document).querySelector(selector);
  const all = (selector, within) => Array.from((within || document).querySelectorAll(selector));

  /* ---- theme: as the system has it, light, dark; kept in this browser */
  const themes = ["auto", "light", "dark"];
  const themeButton = find("[data-theme-choice]");
  const theme = () => document.documentElement.dataset.theme || "auto";
  const showTheme = () => { if (themeButton) themeButton.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[theme()]; };
  if (themeButton) {
    showTheme();
    themeButton.addEventListener("click", () => {
      const next = themes[(themes.indexOf(theme()) + 1) % themes.length];
      if (next === "auto") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = next;
      try { localStorage.setItem("stormproof-theme", next); } catch (refused) { /* it holds until the page is left */ }
      showTheme();
      drawCharts();
    });
  }

  /* ---- keys: / to search; Escape leaves the field */
  document.addEventListener("keydown", (event) => {
    const field = event.target.closest && event.target.closest("input, textarea, select");
    if (event.key === "/" && !field && !event.ctrlKey && !event.metaKey && !event.altKey) {
      const search = find("[data-search]");
      if (search) { event.preventDefault(); search.focus(); search.select(); }
    } else if (event.key === "Escape" && field && field.matches("[data-search]")) field.blur();
  });

  /* ---- forms that follow their fields; boxes that choose all others */
  document.addEventListener("change", (event) => {
    const field = event.target;
    if (field.matches("[data-choose-all]")) {
      const own = field.form ? (box) => box.form === field.form : () => true;
      for (const box of all("input[type=checkbox][data-choose]").filter(own)) box.checked = field.checked;
    }
    if (field.matches("[data-submits]") && field.form) field.form.requestSubmit();
    countChosen();
  });
  function countChosen() {
    const number = all("input[data-choose]:checked").length;
    for (const place of all("[data-chosen]")) place.textContent = String(number);
    for (const button of all("[data-needs-chosen]")) button.disabled = number === 0;
    showLive();
  }

  /* ---- a look at the ledger every few seconds: not while the tab is hidden, rows are chosen, or a field is in use */
  const every = Math.max(1, parseFloat(body.dataset.poll) || 5) * 1000;
  const sign = find("[data-live]");
  const trouble = find("[data-trouble]");
  let stopped = false, failedSince = null, lastGood = new Date(), asking = false;
  const part = () => find("[data-live-part]");
  function whyPaused() {
    if (stopped) return "paused";
    if (document.hidden) return "paused: not in view";
    if (find("input[data-choose]:checked")) return "paused: rows are chosen";
    const holding = part() && part().contains(document.activeElement) && document.activeElement.matches("input:not([type=checkbox]), textarea, select");
    if (holding) return "paused: a field is in use";
    if (find("[data-hold][open], dialog[open]")) return "paused: something is open";
    const chosen = document.getSelection();
    if (chosen && !chosen.isCollapsed && part() && part().contains(chosen.anchorNode)) return "paused: text is chosen";
    return null;
  }
  function showLive() {
    if (!sign) return;
    sign.hidden = !part(); // a part that ended stands as it is
    if (sign.hidden) return;
    const why = whyPaused();
    const shown = why || (failedSince ? "no answer" : "live");
    if (sign.textContent !== shown) sign.textContent = shown;
    sign.className = "live " + (failedSince ? "bad" : why ? "idle" : "ok");
    sign.title = (why ? "" : "A look every " + every / 1000 + " s. ") + "Click to " + (stopped ? "go on." : "pause.");
  }
  if (sign) sign.addEventListener("click", () => { stopped = !stopped; showLive(); });
  function look() {
    showLive();
    if (!part() || !window.htmx || asking || whyPaused()) return;
    asking = true;
    htmx.ajax("GET", location.href, { source: part(), target: part(), select: "#" + part().id, swap: "outerHTML" })
      .catch(() => undefined).finally(() => { asking = false; });
  }
  if (part()) {
    setInterval(look, every);
    setInterval(showLive, 1000);
    document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
    showLive();
  }
  function fails(text) {
    failedSince = failedSince || new Date();
    if (trouble) {
      trouble.hidden = false;
      trouble.textContent = text + " What you see is of " + lastGood.toLocaleTimeString() + "; the page goes on asking.";
    }
    showLive();
  }
  body.addEventListener("htmx:configRequest", (event) => {
    const token = find("meta[name=csrf-token]");
    if (token && event.detail.verb !== "get") event.detail.headers["X-CSRF-Token"] = token.content;
  });
  body.addEventListener("htmx:responseError", (event) => {
    const status = event.detail.xhr.status;
    if (status === 401) fails("The session has ended: open the address that stormproof web printed last.");
    else {
      const told = new DOMParser().parseFromString(event.detail.xhr.responseText, "text/html").querySelector(".told p");
      fails(told ? told.textContent : "The page answered " + status + ".");
    }
  });
  body.addEventListener("htmx:sendError", () => fails("The page's server does not answer."));
  body.addEventListener("htmx:timeout", () => fails("The page's server does not answer in time."));
  body.addEventListener("htmx:afterRequest", (event) => {
    if (!event.detail.successful) return;
    failedSince = null;
    lastGood = new Date();
    if (trouble) trouble.hidden = true;
  });
  body.addEventListener("htmx:beforeSwap", (event) => {
    opened = all("details[id][open]").map((one) => one.id);
    void event;
  });
  let opened = [];
  body.addEventListener("htmx:afterSwap", () => {
    for (const id of opened) { const one = document.getElementById(id); if (one) one.open = true; }
    drawCharts();
    countChosen();
  });

  /* ---- charts: columns over time, stacked; data and labels stand in the element */
  function shownTimes(u, splits, index, space, step) {
    const text = (seconds) => new Date(seconds * 1000).toISOString();
    return splits.map((seconds, at) => {
      if (step >= 86400) return text(seconds).slice(5, 10);
      const day = at === 0 || text(seconds).slice(0, 10) !== text(splits[at - 1]).slice(0, 10);
      return text(seconds).slice(11, 16) + (day ? "\n" + text(seconds).slice(0, 10) : "");
    });
  }
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function drawCharts() {
    if (!window.uPlot) return;
    for (const place of all("[data-chart]")) {
      const given = JSON.parse(place.dataset.chart);
      place.replaceChildren();
      if (!given.times.length) continue;
      const stacked = [given.times];
      const sums = given.times.map(() => 0);
      for (const one of given.series) stacked.push(one.values.map((value, at) => { sums[at] += value; return value ? sums[at] : null; }));
      const bars = uPlot.paths.bars({ size: [0.8, 28], align: 0 });
      const colours = given.series.map((one, at) => colour("--series-" + (at % 6 + 1)));
      const axis = { stroke: colour("--dim"), grid: { stroke: colour("--hair"), width: 1 }, ticks: { stroke: colour("--hair"), width: 1 }, font: "11px " + colour("--sans") };
      const chart = new uPlot({
        width: Math.max(280, place.clientWidth), height: given.height || 190,
        cursor: { drag: { x: false, y: false }, points: { show: false } },
        legend: { live: true },
        scales: { x: { time: true }, y: { range: (u, low, high) => [0, Math.max(1, high * 1.08)] } },
        axes: [Object.assign({ space: 64, values: shownTimes }, axis), Object.assign({ size: 54, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 1000000, 10000000] }, axis)],
        tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
        series: [{ label: "UTC", value: "{YYYY}-{MM}-{DD} {HH}:{mm}" }].concat(given.series.map((one, at) => ({
          label: one.label, paths: bars, points: { show: false }, stroke: colours[at], fill: colours[at],
          value: (u, value, series, index) => index == null ? "–" : String(one.values[index]),
        })).reverse()),
      }, [stacked[0]].concat(stacked.slice(1).reverse()), place);
      place._chart = chart;
    }
  }
  // A page that was kept as it was left: what it asks for may be decided about since.
  window.addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });
  let waiting = 0;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(drawCharts, 150); });
  if (window.matchMedia) matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
  drawCharts();
  countChosen();
})();
