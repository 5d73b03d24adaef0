// The table of every point, sorted by a click on a head. Not all rows are made at once: the rest on request.
"use strict";

const ROWS = 200;  // at once: what a browser lays out in a blink
const body = document.querySelector("tbody"), headRow = document.querySelector("thead").insertRow();

function element(tag, attributes = {}, ...children) {
  const made = Object.assign(document.createElement(tag), attributes);
  made.append(...children);
  return made;
}

function link(url, child) {
  return url ? element("a", { href: url, target: "_blank", rel: "noopener" }, child) : child;
}

function runs(point) {
  const [[id, url], ...others] = point.runs;
  const seeds = others.map(([id, url], i) =>
    element("span", { className: "seeds", title: id }, link(url, String(i + 2))));
  const copy = element("button", { type: "button", className: "copy", textContent: "copy" });
  copy.dataset.ids = point.runs.map(([id]) => id).join("\n");
  return [link(url, element("code", { title: id, textContent: id })), ...seeds, copy];
}

const contents = {
  arm: point => [point.arm],
  family: point => {
    const { label, colour, glyph } = data.families[point.family];
    const mark = element("span", { textContent: glyph });
    mark.style.color = colour;
    return [mark, "\u00a0" + label];
  },
  number: (point, i) => [point.texts[i]],
  status: point => [point.standing],
  details: point => {
    const text = point.facts.map(([name, value]) => `${name}\u00a0${value}`).join(" \u00b7 ");
    return [element("div", { title: text, textContent: text })];
  },
  runs,
};

const numberOf = data.columns.map((column, at) =>
  data.columns.slice(0, at).filter(before => before.kind === "number").length);

const rows = new Map();  // point -> row

function rowOf(point) {
  if (!rows.has(point)) {
    const row = element("tr", { className: point.standing.split(",")[0] });
    data.columns.forEach(({ kind }, at) =>
      row.append(element("td", { className: kind }, ...contents[kind](point, numberOf[at]))));
    rows.set(point, row);
  }
  return rows.get(point);
}

function key(point, at) {
  const { kind } = data.columns[at];
  if (kind === "number") return point.numbers[numberOf[at]];
  if (kind === "runs") return point.runs[0][0];
  if (kind === "details") return point.facts.join();
  return kind === "family" ? data.families[point.family].label : kind === "arm" ? point.arm : point.standing;
}

const collator = new Intl.Collator(undefined, { numeric: true });
const table = { order: [], shown: [], most: ROWS };

// Unknown numbers stay last, whichever the direction.
function sortBy(at, falling) {
  const keys = data.points.map(point => key(point, at));
  const compare = (a, b) => typeof a === "number" ? a - b : collator.compare(a, b);
  table.order = keys.map((_, i) => i).sort((i, j) => keys[i] === null || keys[j] === null
    ? (keys[i] === null) - (keys[j] === null) : (falling ? -1 : 1) * compare(keys[i], keys[j]));
  [...headRow.cells].forEach((head, i) => head.ariaSort = i === at ? (falling ? "descending" : "ascending") : null);
  drawTable(table.shown);
}

const more = element("button", { type: "button", className: "copy", id: "more" });
more.addEventListener("click", () => { table.most += ROWS; drawTable(table.shown); });
document.querySelector(".wide").after(more);

function drawTable(shown) {
  table.shown = shown;
  const listed = table.order.filter(i => shown[i]);
  const drawn = listed.slice(0, table.most);
  body.replaceChildren(...drawn.map(i => rowOf(data.points[i])));
  more.hidden = drawn.length === listed.length;
  more.textContent = `${Math.min(ROWS, listed.length - drawn.length)} more of ${listed.length} rows`;
}

data.columns.forEach(({ title, kind }, at) => {
  const button = element("button", { type: "button", textContent: title });
  const head = element("th", { className: kind === "number" ? "number" : "text", scope: "col" }, button);
  button.addEventListener("click", () => sortBy(at, head.ariaSort === "ascending"));
  headRow.append(head);
});
sortBy(2, false);

body.addEventListener("click", async ({ target: button }) => {
  if (!button.matches(".copy")) return;
  const id = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(button.dataset.ids);
    button.textContent = "copied";
  } catch {  // refused in a sandboxed frame: show the whole text, selected, for the reader to copy
    id.textContent = button.dataset.ids;
    id.classList.add("whole");
    getSelection().selectAllChildren(id);
    button.textContent = "selected";
  }
  setTimeout(() => button.textContent = "copy", 1500);
});
