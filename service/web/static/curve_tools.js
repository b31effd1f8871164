// What curves need beside drawing: the view in the URL, smoothing, units, pictures and tables to keep.
"use strict";
(() => {
  // ---------------------------------------------------------------- the view, as the URL has it

  // Axis, scale, smoothing and zoom are in the address: a reload, a bookmark or a colleague sees the same.
  function readView() {
    const given = new URLSearchParams(location.search);
    const zoom = (given.get("zoom") ?? "").split(",").map(Number);
    const smooth = Number(given.get("smooth") ?? 0);
    return {
      axis: given.get("axis") === "time" ? "time" : "step",
      logarithmic: given.get("scale") === "log",
      smooth: smooth > 0 && smooth < 1 ? smooth : 0,
      zoom: zoom.length === 2 && zoom.every(Number.isFinite) && zoom[0] < zoom[1] ? zoom : null,
    };
  }

  function writeView(view) {
    const query = new URLSearchParams(location.search);
    const set = (name, value) => (value ? query.set(name, value) : query.delete(name));
    set("axis", view.axis === "time" ? "time" : "");
    set("scale", view.logarithmic ? "log" : "");
    set("smooth", view.smooth ? String(view.smooth) : "");
    set("zoom", view.zoom ? view.zoom.map((each) => Number(each.toPrecision(10))).join(",") : "");
    const text = query.toString().replaceAll("%2C", ",");
    history.replaceState(history.state, "", `${location.pathname}${text ? `?${text}` : ""}${location.hash}`);
  }

  // ---------------------------------------------------------------- smoothing

  // An exponential mean without the bias of its beginning, as TensorBoard's. Gaps stay gaps.
  function smoothed(points, weight) {
    let sum = 0;
    let norm = 0;
    return points.map(([step, at, value]) => {
      if (value === null) return [step, at, null];
      sum = sum * weight + value * (1 - weight);
      norm = norm * weight + (1 - weight);
      return [step, at, sum / norm];
    });
  }

  // ---------------------------------------------------------------- units, by the name of a metric

  const short = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(4)).toString());
  const UNITS = [
    [/_bytes_per_s$/, "B/s"],
    [/_per_s(ec(ond)?)?$/, "/s"],
    [/_bytes$/, "B"],
    [/_ms$/, "ms"],
    [/_(s|sec|seconds)$/, "s"],
    [/_(percent|pct)$/, "%"],
    [/_w(atts)?$/, "W"],
    [/_celsius$/, "°C"],
    [/_cores$/, "cores"],
  ];

  function unitOf(name) {
    return UNITS.find(([pattern]) => pattern.test(name))?.[1] ?? "";
  }

  function withUnit(value, unit) {
    if (value === null || value === undefined || !unit) return short(value);
    if (!unit.startsWith("B")) return unit === "%" || unit.startsWith("/") ? `${short(value)}${unit}` : `${short(value)} ${unit}`;
    const places = ["", "k", "M", "G", "T", "P"];
    let place = 0;
    while (Math.abs(value) >= 1000 && place < places.length - 1) (value /= 1000), (place += 1);
    return `${short(value)} ${places[place]}${unit}`;
  }

  // ---------------------------------------------------------------- to keep

  function save(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  // The chart as drawn, with its title and the names of its lines, on the page's own ground.
  function toPicture(uplot, title, lines, name) {
    const scale = devicePixelRatio;
    const source = uplot.ctx.canvas;
    const [head, row] = [30 * scale, 18 * scale];
    const canvas = document.createElement("canvas");
    canvas.width = source.width;
    canvas.height = source.height + head + row * lines.length + 6 * scale;
    const ctx = canvas.getContext("2d");
    const colour = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
    ctx.fillStyle = colour("--raised");
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    ctx.fillStyle = colour("--text");
    ctx.font = `600 ${13 * scale}px ui-sans-serif, system-ui, sans-serif`;
    ctx.fillText(title, 12 * scale, 20 * scale);
    ctx.drawImage(source, 0, head);
    ctx.font = `${11 * scale}px ui-sans-serif, system-ui, sans-serif`;
    lines.forEach((line, index) => {
      const y = head + source.height + row * index;
      ctx.fillStyle = colour(line.stroke);
      ctx.fillRect(12 * scale, y + 4 * scale, 12 * scale, 4 * scale);
      ctx.fillStyle = colour("--text");
      ctx.fillText(line.label, 30 * scale, y + 10 * scale);
    });
    canvas.toBlob((blob) => save(blob, `${name}.png`), "image/png");
  }

  const fileName = (text) => text.replace(/[^\w.-]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 100) || "curves";

  window.everstep.curves = { readView, writeView, smoothed, unitOf, withUnit, short, toPicture, fileName };
})();
