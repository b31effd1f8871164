// The editor of a spec: checked by the service as it is typed, a form beside it, and the fields that fit at the cursor.
"use strict";
(() => {
  const CHECK_MS = 400;
  const byId = (id) => document.getElementById(id);
  const form = byId("new-run");
  const text = byId("spec");
  const gutter = byId("gutter");
  let faults = [...byId("faults").querySelectorAll("button")].map((each) => ({ line: Number(each.dataset.line) }));

  async function ask(path, fields) {
    const body = new URLSearchParams({ csrf: form.elements.csrf.value, ...fields });
    const answer = await fetch(path, { method: "POST", body, headers: { Accept: "application/json" } });
    if (answer.status === 401) return location.assign("/login");
    if (!answer.ok) throw new Error(`the service responded with status ${answer.status}`);
    window.everstep.heard();
    return answer.json();
  }

  // ---------------------------------------------------------------- lines

  function drawGutter() {
    const wrong = new Set(faults.map((fault) => fault.line));
    const lines = text.value.split("\n").map((_, index) => {
      const line = document.createElement("span");
      line.textContent = `${index + 1}\n`;
      if (wrong.has(index + 1)) line.className = "wrong";
      return line;
    });
    gutter.replaceChildren(...lines);
    gutter.scrollTop = text.scrollTop;
  }

  function goTo(line) {
    const lines = text.value.split("\n");
    const start = lines.slice(0, line - 1).reduce((sum, each) => sum + each.length + 1, 0);
    text.focus();
    text.setSelectionRange(start, start + (lines[line - 1] ?? "").length);
    text.scrollTop = (line - 6) * (text.scrollHeight / Math.max(lines.length, 1));
  }

  // ---------------------------------------------------------------- faults

  let due = null;
  let asked = 0;

  function checkSoon() {
    clearTimeout(due);
    due = setTimeout(check, CHECK_MS);
  }

  async function check() {
    const mine = (asked += 1);
    try {
      const answer = await ask("/new/check", { spec: text.value });
      if (answer && mine === asked) show(answer);
    } catch (problem) {
      byId("summary").textContent = `The spec could not be checked: ${problem.message}.`;
      window.everstep.away();
    }
  }

  function show(answer) {
    faults = answer.faults;
    byId("nothing-sent")?.remove();
    byId("summary").textContent = faults.length ? `${faults.length} fault${faults.length === 1 ? "" : "s"}` : "The service would accept this spec.";
    byId("faults").replaceChildren(...faults.map(faultItem));
    text.setAttribute("aria-invalid", String(faults.length > 0));
    for (const input of form.querySelectorAll("[data-path]")) {
      if (input !== document.activeElement) input.value = answer.fields[input.dataset.path] ?? "";
    }
    drawGutter();
  }

  function faultItem(fault) {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "quiet small";
    button.dataset.line = fault.line;
    button.textContent = `line ${fault.line}`;
    const field = document.createElement("code");
    field.textContent = fault.field;
    item.append(button, " ", field, ` ${fault.msg}`);
    return item;
  }

  byId("faults").addEventListener("click", (event) => {
    const line = event.target.closest("[data-line]")?.dataset.line;
    if (line) goTo(Number(line));
  });

  // ---------------------------------------------------------------- the form

  let changing = Promise.resolve();

  // One change at a time: each is made in the text that the last one left.
  function setField(input) {
    changing = changing.then(async () => {
      try {
        const answer = await ask("/new/field", { spec: text.value, path: input.dataset.path, value: input.value });
        if (!answer) return;
        text.value = answer.spec;
        drawGutter();
        await check();
      } catch (problem) {
        byId("summary").textContent = `The form cannot change this text: ${problem.message}. Correct the YAML first.`;
      }
    });
  }

  for (const input of form.querySelectorAll("[data-path]")) {
    input.addEventListener("change", () => setField(input));
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      input.blur();
    });
  }

  // ---------------------------------------------------------------- fields that fit at the cursor

  let schema = null;

  // The objects that a part of the schema may be.
  function objects(part, depth = 0) {
    if (!part || depth > 8) return [];
    if (part.$ref) return objects(part.$ref.split("/").slice(1).reduce((at, name) => at?.[name], schema), depth + 1);
    const several = [...(part.anyOf ?? []), ...(part.oneOf ?? []), ...(part.allOf ?? [])];
    return [...(part.properties ? [part] : []), ...several.flatMap((each) => objects(each, depth + 1))];
  }

  function below(parts, name) {
    return parts.flatMap((part) => objects(part.properties[name]));
  }

  const indentOf = (line) => line.match(/^ */)[0].length;
  const keyOf = (line) => line.match(/^ *([A-Za-z_][\w-]*) *:/)?.[1];

  // The keys of the sections around a line, and the indentation of the fields in the innermost.
  function placeOf(lines, index) {
    const own = lines[index] ?? "";
    let indent = own.trim() ? indentOf(own) : Math.max(indentOf(own), text.selectionStart - lines.slice(0, index).reduce((sum, each) => sum + each.length + 1, 0));
    const path = [];
    const fieldsIndent = indent;
    for (let at = index - 1; at >= 0 && indent > 0; at -= 1) {
      if (!lines[at].trim() || indentOf(lines[at]) >= indent || !keyOf(lines[at])) continue;
      path.unshift(keyOf(lines[at]));
      indent = indentOf(lines[at]);
    }
    return { path, indent: fieldsIndent };
  }

  function taken(lines, index, indent) {
    const found = new Set();
    for (const step of [-1, 1]) {
      for (let at = index + (step < 0 ? 0 : 1); at >= 0 && at < lines.length; at += step) {
        if (!lines[at].trim()) continue;
        if (indentOf(lines[at]) < indent) break;
        if (indentOf(lines[at]) === indent && keyOf(lines[at])) found.add(keyOf(lines[at]));
      }
    }
    return found;
  }

  function complete() {
    if (!schema) return;
    const lines = text.value.split("\n");
    const index = text.value.slice(0, text.selectionStart).split("\n").length - 1;
    const { path, indent } = placeOf(lines, index);
    const parts = path.reduce(below, objects(schema));
    const known = new Map(parts.flatMap((part) => Object.entries(part.properties)));
    const present = taken(lines, index, indent);
    const typed = (lines[index] ?? "").trim();
    const fitting = [...known].filter(([name]) => !present.has(name) && (typed.includes(":") || name.startsWith(typed)));
    byId("completion-place").textContent = path.length ? `in ${path.join(".")}` : "at the top of the spec";
    byId("completion-list").replaceChildren(...fitting.map(([name, part]) => fieldItem(name, part, indent)));
    byId("completion").hidden = false;
  }

  function fieldItem(name, part, indent) {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "quiet small";
    button.textContent = name;
    button.addEventListener("click", () => insert(name, objects(part).length > 0, part.default, indent));
    item.append(button);
    if (part.description) {
      const words = document.createElement("span");
      words.className = "sub";
      words.textContent = part.description.replaceAll("``", "").replace(/\s+/g, " ");
      item.append(words);
    }
    return item;
  }

  function insert(name, isSection, value, indent) {
    const start = text.value.lastIndexOf("\n", text.selectionStart - 1) + 1;
    const end = (text.value.indexOf("\n", start) + text.value.length + 1) % (text.value.length + 1);
    const line = text.value.slice(start, end);
    const pad = " ".repeat(indent);
    const simple = value !== undefined && value !== null && typeof value !== "object";
    const entry = `${pad}${name}:${isSection ? `\n${pad}  ` : simple ? ` ${value}` : " "}`;
    const keep = keyOf(line) ? `${line}\n` : "";
    text.setRangeText(keep + entry, start, end, "end");
    text.focus();
    text.dispatchEvent(new Event("input"));
  }

  // ---------------------------------------------------------------- start

  text.addEventListener("input", () => {
    drawGutter();
    checkSoon();
    complete();
  });
  text.addEventListener("scroll", () => (gutter.scrollTop = text.scrollTop));
  for (const name of ["click", "keyup", "focus"]) text.addEventListener(name, complete);
  byId("form-fields").disabled = byId("form-fields").hidden = false;
  drawGutter();
  fetch("/static/spec.schema.json").then(async (answer) => {
    if (!answer.ok) return;
    schema = await answer.json();
    complete();
  });
})();
