// Curves of one run, live, or of several runs together. Drawn by uPlot from series that the service has down-sampled.
"use strict";
(() => {
  const MOST_POINTS = 4500;
  const REDRAW_MS = 400;
  const REREAD_MS = 600;
  const REREAD_SYSTEM_MS = 10000;
  const root = document.getElementById("charts");
  const urls = root.dataset.curves.split(" ");
  const single = urls.length === 1;
  const system = document.getElementById("system");
  const { readView, writeView, smoothed, unitOf, withUnit, short, toPicture, fileName } = window.everstep.curves;
  const state = { ...readView(), all: false, runs: [], plots: new Map() };

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // ---------------------------------------------------------------- reading

  async function read() {
    readAt = performance.now();
    try {
      const answers = await Promise.all(urls.map(readOne));
      if (answers.includes(null)) return;
      state.runs = answers;
      draw();
      window.everstep.heard();
    } catch (problem) {
      failed(problem);
    }
  }

  async function readOne(url) {
    const query = new URLSearchParams({ all: state.all, system: system !== null });
    const answer = await fetch(`${url}?${query}`, { headers: { Accept: "application/json" } });
    if (answer.status === 401) {
      location.assign("/login");
      return null;
    }
    if (!answer.ok) throw new Error(`the service responded with status ${answer.status}`);
    return answer.json();
  }

  function failed(problem) {
    if (state.plots.size) return window.everstep.away();
    const text = message(`Loading the curves failed: ${problem.message}. `);
    const again = document.createElement("button");
    again.type = "button";
    again.textContent = "Try again";
    again.addEventListener("click", read);
    text.append(again);
  }

  function message(words) {
    const text = document.createElement("p");
    text.className = "dim state";
    text.textContent = words;
    root.replaceChildren(text);
    return text;
  }

  // ---------------------------------------------------------------- figures

  function charts() {
    const all = state.runs.flatMap((run) => run.charts);
    return [...new Map(all.map((chart) => [chart.title, chart])).values()];
  }

  function draw() {
    const wanted = charts();
    for (const [title, plot] of state.plots) if (!wanted.some((chart) => chart.title === title)) (plot.destroy(), state.plots.delete(title));
    if (wanted.every((chart) => chart.figure)) message(single ? "No metrics yet. Curves appear with the first step." : "None of these runs has metrics yet.");
    else root.querySelector(".state")?.remove();
    if (system) system.hidden = !wanted.some((chart) => chart.figure);
    for (const chart of wanted) {
      if (!state.plots.has(chart.title)) state.plots.set(chart.title, new Plot(chart));
      state.plots.get(chart.title).update();
    }
    if (!wanted.length) return;
    more();
    document.getElementById("curve-choices").hidden = false;
    showView();
  }

  function showView() {
    for (const choice of document.querySelectorAll("input[name=axis]")) choice.checked = choice.value === state.axis;
    document.getElementById("log-scale").checked = state.logarithmic;
    document.getElementById("smooth").value = state.smooth;
    document.getElementById("smooth-value").textContent = state.smooth ? state.smooth.toFixed(2) : "off";
    document.getElementById("reset-zoom").hidden = state.zoom === null;
  }

  // Draw everything anew for another view.
  function preview(view) {
    Object.assign(state, view);
    if (state.runs.length) draw();
    else showView();
  }

  // Draw another view, and keep it in the URL.
  function change(view) {
    preview(view);
    writeView(state);
  }

  // The number of a run's charts of metrics that are not shown yet.
  function numHidden(run) {
    return run.num_charts - run.charts.filter((chart) => !chart.figure).length;
  }

  function more() {
    root.querySelector(".more")?.remove();
    const hidden = Math.max(...state.runs.map(numHidden));
    if (hidden <= 0) return;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "more";
    button.textContent = `Show ${hidden} more`;
    button.addEventListener("click", () => {
      state.all = true;
      read();
    });
    root.append(button);
  }

  // Lines of one chart: a metric and its validation counterpart, or one line per run.
  function linesOf(title) {
    const lines = [];
    state.runs.forEach((run, index) => {
      const chart = run.charts.find((each) => each.title === title);
      for (const [place, name] of (chart?.names ?? []).entries()) {
        const points = run.series[name] ?? [];
        const number = single ? place : index;
        lines.push({
          label: single ? (chart.labels?.[place] ?? name) : `${run.run.name} ${chart.names.length > 1 ? name : ""}`.trim(),
          name,
          run,
          points,
          stroke: `--series-${(number % 8) + 1}`,
          dashes: !single && place > 0 ? [6, 4] : [],
          isValidation: name.startsWith("val_"),
        });
      }
    });
    return lines;
  }

  // With smoothing, each line is drawn twice: faintly as it is, and smoothed.
  function drawnLines(lines) {
    if (!state.smooth) return lines;
    return [
      ...lines.map((line) => ({ ...line, label: `${line.label} raw`, isFaint: true })),
      ...lines.map((line) => ({ ...line, points: smoothed(line.points, state.smooth) })),
    ];
  }

  // One table of x with a column for each line; of two values with the same x the newest wins.
  function tableOf(lines, axis) {
    const tables = lines.map(({ points }) => {
      const begin = points.length ? points[0][1] : 0;
      const at = axis === "step" ? (point) => point[0] : single ? (point) => point[1] : (point) => point[1] - begin;
      const columns = new Map();
      for (const point of points) {
        const value = state.logarithmic && point[2] !== null && point[2] <= 0 ? null : point[2];
        columns.set(at(point), value);
      }
      const xs = [...columns.keys()].sort((a, b) => a - b);
      return [xs, xs.map((x) => columns.get(x))];
    });
    return tables.length ? uPlot.join(tables) : [[]];
  }

  class Plot {
    constructor({ title, figure }) {
      this.title = title;
      this.unit = unitOf(figure ?? title);
      this.isSystem = Boolean(figure);
      this.figure = document.createElement("figure");
      this.figure.className = "chart";
      const caption = document.createElement("figcaption");
      const heading = document.createElement("h3");
      heading.textContent = title;
      this.summary = document.createElement("span");
      this.summary.className = "summary";
      caption.append(heading, this.summary, this.buttons());
      this.place = document.createElement("div");
      this.place.className = "plot";
      this.figure.append(caption, this.place);
      (this.isSystem ? document.getElementById("system-charts") : root).append(this.figure);
      this.uplot = null;
      this.key = "";
      new ResizeObserver(() => this.uplot?.setSize(this.size())).observe(this.place);
    }

    buttons() {
      const place = document.createElement("span");
      place.className = "keep";
      const picture = document.createElement("button");
      picture.type = "button";
      picture.className = "quiet small";
      picture.textContent = "PNG";
      picture.setAttribute("aria-label", `PNG: save ${this.title} as a picture`);
      picture.addEventListener("click", () => toPicture(this.uplot, this.title, this.lines, this.fileName()));
      this.table = document.createElement("a");
      this.table.className = "button quiet small";
      this.table.textContent = "CSV";
      this.table.setAttribute("aria-label", `CSV: save every value of ${this.title}`);
      this.table.setAttribute("download", "");
      place.append(picture, this.table);
      return place;
    }

    fileName() {
      return fileName(`${state.runs.map((run) => run.run.name).join("-")}-${this.title}`);
    }

    csvUrl() {
      const query = new URLSearchParams();
      for (const id of new Set(this.lines.map((line) => line.run.run.id))) query.append("run", id);
      for (const name of new Set(this.lines.map((line) => line.name))) query.append("name", name);
      return `/curves.csv?${query}`;
    }

    size() {
      return { width: Math.max(200, this.place.clientWidth), height: 200 };
    }

    update() {
      this.lines = linesOf(this.title);
      const lines = drawnLines(this.lines);
      // What a host does has no step.
      this.axis = this.isSystem ? "time" : state.axis;
      const table = tableOf(lines, this.axis);
      const key = JSON.stringify([lines.map((line) => line.label), this.axis, state.logarithmic]);
      if (this.uplot && key === this.key) {
        this.uplot.setData(table, state.zoom === null || this.axis !== state.axis);
      } else {
        this.uplot?.destroy();
        this.uplot = new uPlot(this.options(lines), table, this.place);
        this.uplot.over.addEventListener("dblclick", () => change({ zoom: null }));
        this.key = key;
      }
      if (state.zoom && this.axis === state.axis) this.uplot.setScale("x", { min: state.zoom[0], max: state.zoom[1] });
      this.table.href = this.csvUrl();
      this.summarize(this.lines);
    }

    summarize(lines) {
      const words = lines.flatMap(({ label, points }) => {
        const values = points.map((point) => point[2]).filter((value) => value !== null);
        if (!values.length) return [];
        const last = points.findLast((point) => point[2] !== null);
        return [{ label, now: withUnit(last[2], this.unit), step: last[0], low: short(values.reduce((a, b) => Math.min(a, b))), high: short(values.reduce((a, b) => Math.max(a, b))) }];
      });
      this.summary.textContent = single ? words.map((each) => each.now).join(" · ") : "";
      const text = words.map((each) => `${each.label}: ${each.now}${this.isSystem ? "" : ` at step ${each.step}`}, between ${each.low} and ${each.high}`).join("; ");
      const canvas = this.uplot.root.querySelector(".u-wrap");
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${this.title}. ${text || "no values"}`);
    }

    options(lines) {
      const grid = { stroke: colour("--line"), width: 1 };
      const axis = { stroke: colour("--dim"), grid, ticks: grid, font: "11px ui-sans-serif, system-ui, sans-serif" };
      const clock = this.axis === "time" && single;
      const elapsed = (u, values) => values.map((value) => (value < 120 ? `${Number(value.toFixed(1))} s` : `${Number((value / 60).toFixed(1))} min`));
      const series = lines.map((line) => {
        const few = line.points.length < 40;
        const stroke = colour(line.stroke);
        return { label: line.label, stroke, alpha: line.isFaint ? 0.3 : 1, width: line.isFaint ? 1 : 1.6, dash: line.dashes, value: (u, value) => withUnit(value, this.unit), points: { show: line.isValidation && few || line.points.length === 1, size: 5, fill: stroke } };
      });
      const moments = (u, values) => {
        const length = u.scales.x.max - u.scales.x.min;
        const [from, to] = length < 1200 ? [11, 19] : length < 172800 ? [11, 16] : [5, 16];
        return values.map((value) => new Date(value * 1000).toISOString().slice(from, to).replace("T", " "));
      };
      const xLabel = this.axis === "step" ? "step" : single ? "time" : "since the first step";
      return {
        ...this.size(),
        tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
        cursor: { sync: { key: `everstep ${this.axis}` }, points: { size: 6 } },
        scales: { x: { time: clock }, y: state.logarithmic ? { distr: 3 } : {} },
        axes: [
          { ...axis, size: 32, ...(clock ? { values: moments, space: 80 } : this.axis === "time" ? { values: elapsed } : {}), ...(this.axis === "step" ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7] } : {}) },
          { ...axis, size: widthOf, values: (u, values) => values.map((value) => (value === null ? "" : withUnit(value, this.unit))) },
        ],
        series: [{ label: xLabel, ...(clock ? { value: "{HH}:{mm}:{ss}" } : {}) }, ...series],
        hooks: { draw: [single ? (u) => drawMarks(u, this.axis) : () => {}], setSelect: this.axis === state.axis ? [zoomTo] : [] },
      };
    }

    destroy() {
      this.uplot?.destroy();
      this.figure.remove();
    }
  }

  // The width in CSS pixels that the words of a value axis need, with their ticks. uPlot asks again once it knows it.
  function widthOf(u, words, index, asked) {
    const axis = u.axes[index];
    if (asked > 1) return axis._size;
    u.ctx.font = axis.font[0];
    const longest = Math.max(0, ...(words ?? []).map((each) => u.ctx.measureText(each).width));
    return Math.max(54, Math.ceil(axis.ticks.size + axis.gap + longest / devicePixelRatio) + 4);
  }

  // A selection in one chart zooms all of them. uPlot repeats it in the others: the first counts.
  let chosenZoom = null;

  function zoomTo(u) {
    if (u.select.width <= 0 || chosenZoom) return;
    chosenZoom = [u.select.left, u.select.left + u.select.width].map((x) => u.posToVal(x, "x"));
    setTimeout(() => {
      change({ zoom: chosenZoom });
      chosenZoom = null;
    });
  }

  // A dashed line with a sign wherever the run resumed: the attempt's number after a restart.
  function drawMarks(u, axis) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("--fault");
    ctx.lineWidth = devicePixelRatio;
    ctx.font = `${11 * devicePixelRatio}px ui-sans-serif, system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    let free = -Infinity;
    for (const mark of state.runs[0].marks) {
      const x = u.valToPos(axis === "step" ? mark.step : mark.at, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const words = mark.sign;
      const width = ctx.measureText(words).width + 10 * devicePixelRatio;
      const left = Math.min(x + 3 * devicePixelRatio, bbox.left + bbox.width - width);
      if (left < free) continue;
      ctx.fillText(words, left, bbox.top + 11 * devicePixelRatio);
      free = left + width;
    }
    ctx.restore();
  }

  // ---------------------------------------------------------------- live

  let redraw = null;
  let drawnAt = -REDRAW_MS;
  let readAt = -Infinity;
  let reread = null;
  let rereadAt = Infinity;

  // Read everything again, at the earliest of the times that were asked for.
  function rereadIn(ms) {
    const at = performance.now() + ms;
    if (at >= rereadAt) return;
    clearTimeout(reread);
    rereadAt = at;
    reread = setTimeout(() => {
      rereadAt = Infinity;
      read();
    }, ms);
  }

  function add(name, step, at, value) {
    const points = state.runs[0].series[name];
    if (!points) return false;
    while (points.length && points[points.length - 1][0] >= step) points.pop();
    points.push([step, at, value]);
    return points.length <= MOST_POINTS;
  }

  function take(event) {
    if (!state.runs.length) return true;
    if (event.kind === "metrics") {
      return event.data.points.every((point) => Object.entries(point.values).every(([name, value]) => add(name, point.step, point.at, value) || isHidden(name)));
    }
    if (event.kind === "evaluated") {
      const at = Date.parse(event.at) / 1000;
      return Object.entries(event.data.metrics).every(([name, value]) => {
        const shown = name.startsWith("val_") ? name : `val_${name}`;
        return add(shown, event.data.step, at, value) || isHidden(shown);
      });
    }
    return !["failure", "restored"].includes(event.kind);
  }

  // Whether a metric belongs to a hidden chart, whose points are ignored.
  function isHidden(name) {
    const run = state.runs[0];
    return !run.series[name] && numHidden(run) > 0;
  }

  if (single) {
    document.addEventListener("everstep:event", ({ detail }) => {
      if (state.runs.length && detail.seq <= state.runs[0].seq) return;
      // Every rank of a large run reports its use: a read for each report would load all curves again and again.
      if (["rank_use", "gpu_use"].includes(detail.kind)) return rereadIn(Math.max(REREAD_MS, readAt + REREAD_SYSTEM_MS - performance.now()));
      if (!take(detail)) return rereadIn(REREAD_MS);
      // Immediately after a pause, and at a limited rate during a burst.
      redraw ??= setTimeout(() => {
        redraw = null;
        drawnAt = performance.now();
        if (state.runs.length) draw();
      }, Math.max(0, drawnAt + REDRAW_MS - performance.now()));
    });
  }

  document.addEventListener("everstep:theme", () => {
    for (const plot of state.plots.values()) plot.key = "";
    if (state.runs.length) draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("everstep:theme")));
  for (const choice of document.querySelectorAll("input[name=axis]")) {
    choice.addEventListener("change", () => change({ axis: choice.value, zoom: null }));
  }
  document.getElementById("log-scale").addEventListener("change", (event) => change({ logarithmic: event.target.checked }));
  // A slider that moves sends many inputs, and Safari throws after 100 changes of the URL within 30 s.
  document.getElementById("smooth").addEventListener("input", (event) => preview({ smooth: Number(event.target.value) }));
  document.getElementById("smooth").addEventListener("change", (event) => change({ smooth: Number(event.target.value) }));
  document.getElementById("reset-zoom").addEventListener("click", () => change({ zoom: null }));
  read();
})();
