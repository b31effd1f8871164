// Behaviour of every page: theme, live updates by polling and streams, and a banner when the service is unreachable.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);

  // ---------------------------------------------------------------- colours

  const themes = { auto: "as the system", light: "light", dark: "dark" };
  const signs = { auto: "◐", light: "○", dark: "●" };

  function showTheme(button) {
    const theme = document.documentElement.dataset.theme;
    button.textContent = signs[theme];
    button.setAttribute("aria-label", `Colours: ${themes[theme]}`);
    button.title = `Colours: ${themes[theme]}`;
  }

  function nextTheme(button) {
    const names = Object.keys(themes);
    const theme = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
    document.documentElement.dataset.theme = theme;
    const age = theme === "auto" ? 0 : 31536000;
    document.cookie = `everstep_theme=${theme}; path=/; max-age=${age}; samesite=lax`;
    showTheme(button);
    document.dispatchEvent(new Event("everstep:theme"));
  }

  // ---------------------------------------------------------------- times in the reader's zone, in UTC on hover

  const pad = (number, width = 2) => String(number).padStart(width, "0");
  const clockOf = (at) => `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
  const dayOf = (at) => `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;

  function toLocal() {
    for (const each of document.querySelectorAll("time[datetime]:not([data-local])")) {
      const at = new Date(each.dateTime);
      each.dataset.local = "";
      if (each.matches(".short")) each.textContent = `${clockOf(at)}.${pad(at.getMilliseconds(), 3)}`;
      else if (each.matches(".clock")) each.textContent = `${dayOf(at)} ${clockOf(at)}`;
      else each.title = `${dayOf(at)} ${clockOf(at)} (${each.title})`;
    }
  }

  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  byId("zone").textContent = `Times are in your time zone (${zone}); hover over one for UTC.`;
  toLocal();
  document.addEventListener("htmx:load", toLocal);

  // ---------------------------------------------------------------- the service is unreachable

  const banner = byId("connection");
  let lastHeard = new Date();

  function away() {
    if (!banner.hidden) return;
    banner.textContent = `The service does not respond. This page shows the state at ${clockOf(lastHeard)}; retrying.`;
    banner.hidden = false;
  }

  function heard() {
    lastHeard = new Date();
    if (!banner.hidden) banner.hidden = true;
  }

  window.everstep = { away, heard };

  // ---------------------------------------------------------------- swaps that keep focus, selection and open parts

  const lastAnswers = new Map();
  let opened = [];
  let chosen = new Set();
  let scrolled = null;
  let focused = null;

  const focusables = () => [...document.querySelectorAll("main :is(a, button, input, summary, [tabindex])")];

  // Identify the focused element, to find it again in new markup: by id or URL, else by position.
  function focusNow() {
    const element = document.activeElement;
    if (!element || !element.closest("main") || element.matches("main")) return null;
    return { element, id: element.id, href: element.getAttribute("href"), label: element.getAttribute("aria-label"), index: focusables().indexOf(element) };
  }

  function focusAgain(was) {
    if (!was || was.element.isConnected) return;
    const all = focusables();
    const same = all.filter((each) => (was.id ? each.id === was.id : was.href ? each.getAttribute("href") === was.href : was.label && each.getAttribute("aria-label") === was.label));
    (same[0] ?? all[was.index])?.focus({ preventScroll: true });
  }

  document.addEventListener("htmx:beforeSwap", (event) => {
    const { xhr, target, elt } = event.detail;
    if (xhr.status !== 200) return;
    heard();
    const isPoll = event.detail.requestConfig.triggeringEvent?.type === "refresh";
    const isBusy = document.querySelector("details.confirm[open]") || getSelection().type === "Range";
    // The CSRF token differs in every response: ignore it when comparing.
    const text = event.detail.serverResponse.replace(/name="csrf" value="[^"]*"/g, "");
    if (isPoll && (isBusy || lastAnswers.get(elt.id) === text)) {
      event.detail.shouldSwap = false;
      return;
    }
    lastAnswers.set(elt.id, text);
    focused = focusNow();
    opened = [...document.querySelectorAll("details[open][id]")].map((each) => each.id);
    chosen = new Set([...document.querySelectorAll("#found input[name=run]:checked")].map((each) => each.value));
    const log = target.matches("[data-tail]") ? target.querySelector(".log") : null;
    scrolled = log && log.scrollHeight - log.scrollTop - log.clientHeight > 24 ? log.scrollTop : null;
  });

  document.addEventListener("htmx:afterSettle", () => {
    for (const id of opened) if (byId(id)) byId(id).open = true;
    for (const box of document.querySelectorAll("#found input[name=run]")) if (chosen.has(box.value)) box.checked = true;
    focusAgain(focused);
    toTail(scrolled);
  });

  for (const name of ["htmx:sendError", "htmx:timeout"]) document.addEventListener(name, away);
  document.addEventListener("htmx:responseError", (event) => {
    if (event.detail.xhr.status >= 500) away();
  });

  function toTail(position) {
    const log = document.querySelector("[data-tail] .log");
    if (log) log.scrollTop = position ?? log.scrollHeight;
  }

  // ---------------------------------------------------------------- polling, while the page is visible

  const asked = new WeakMap();

  function poll() {
    if (document.hidden) return;
    for (const element of document.querySelectorAll("[data-poll]")) {
      const now = performance.now();
      if (!asked.has(element)) asked.set(element, now);
      if (now - asked.get(element) < Number(element.dataset.poll)) continue;
      asked.set(element, now);
      htmx.trigger(element, "refresh");
    }
  }

  // ---------------------------------------------------------------- the stream of a run's events

  const QUIET_MS = 250;
  const METRICS_MS = 2000;

  function follow(live) {
    let source = null;
    let after = Number(live.dataset.after);
    let due = null;
    let dueAt = Infinity;
    let ended = false;

    function refreshIn(ms) {
      const at = performance.now() + ms;
      if (at >= dueAt) return;
      clearTimeout(due);
      dueAt = at;
      due = setTimeout(() => {
        dueAt = Infinity;
        htmx.trigger(live, "refresh");
      }, ms);
    }

    function onEvent(message) {
      heard();
      const event = JSON.parse(message.data);
      after = event.seq;
      document.dispatchEvent(new CustomEvent("everstep:event", { detail: event }));
      if (event.kind === "status") {
        byId("announce").textContent = `The run is now ${event.data.to.toLowerCase()}.`;
        ended = ["SUCCEEDED", "FAILED", "CANCELLED"].includes(event.data.to);
        if (ended) source.close();
      }
      refreshIn(event.kind === "metrics" ? METRICS_MS : QUIET_MS);
    }

    function open() {
      if (ended || source || document.hidden) return;
      source = new EventSource(`${live.dataset.stream}?after=${after}`);
      source.onopen = heard;
      source.onmessage = onEvent;
      source.onerror = () => {
        away();
        if (source.readyState !== EventSource.CLOSED) return;
        source = null;
        setTimeout(open, 2000);
      };
    }

    // A hidden page holds no connection: browsers allow only a few for each service.
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) return open();
      source?.close();
      source = null;
    });
    open();
  }

  // ---------------------------------------------------------------- start

  const themeButton = byId("theme");
  showTheme(themeButton);
  themeButton.hidden = false;
  themeButton.addEventListener("click", () => nextTheme(themeButton));

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") for (const each of document.querySelectorAll("details.confirm[open]")) each.open = false;
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
    const field = document.querySelector("[data-shortcut='/']");
    if (!field) return;
    event.preventDefault();
    field.focus();
    field.select();
  });

  toTail(null);
  setInterval(poll, 250);
  const live = document.querySelector("[data-stream]");
  if (live) follow(live);
})();
