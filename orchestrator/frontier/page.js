// Filters: what is hidden in the plots is hidden in the table.
"use strict";

const filters = document.getElementById("filters");
const roles = new Set(data.panels.flatMap(panel => panel.traces.map(trace => trace.meta.role)));
const standings = data.points.map(point => point.standing.split(",")[0]);
const texts = data.points.map(point =>
  [point.arm, data.families[point.family].label, point.family, point.standing, ...point.facts.map(fact => fact.join(" ")),
    ...point.runs.map(([id]) => id)].join("\n").toLowerCase());
const state = { shown: [], hidden: new Set(), familyLines: false, papers: true, frontierOnly: false };
const hiddenStandings = new Set();

function checkbox(label, checked, onChange) {
  const box = element("input", { type: "checkbox", checked });
  box.addEventListener("change", () => { onChange(box.checked); draw(); });
  return element("label", {}, box, label);
}

function toggle(set, member) {
  return on => on ? set.delete(member) : set.add(member);
}

const counts = element("output");
const search = element("input", { type: "search", placeholder: "Arm, setting, run \u2026", ariaLabel: "Search" });

function buildFilters() {
  const families = Object.entries(data.families).map(([family, { label, colour, glyph }]) => {
    const mark = element("span", { textContent: glyph });
    mark.style.color = colour;
    return checkbox(element("span", {}, mark, " " + label), true, toggle(state.hidden, family));
  });
  const known = ["frontier", "dominated", "operating", "confirm", "running", "stopped", "diverged", "failed"];
  const present = known.filter(standing => standing !== "frontier" && standings.includes(standing));
  const statuses = present.map(standing => checkbox(standing[0].toUpperCase() + standing.slice(1), true, toggle(hiddenStandings, standing)));
  const switches = [checkbox("Frontier only", false, on => state.frontierOnly = on)];
  if (roles.has("family")) switches.push(checkbox("Frontier of each family", false, on => state.familyLines = on));
  if (roles.has("published")) switches.push(checkbox("Published", true, on => state.papers = on));
  for (const group of [families, statuses, switches])
    if (group.length) filters.append(element("fieldset", {}, ...group));
  filters.append(search, counts);
}

// What a mark means, for the marks that are drawn. Each drawing is 26 by 12.
const MARKS = {
  front: ["Frontier", "M0 6H26"],
  dense: ["Dense alone", "M0 6H5M10 6H16M21 6H26"],
  band: ["Middle half of the seeds", "M0 1H26V11H0Z", "fill"],
  confirm: ["Confirmation, not counted", "M13 0l1.8 4.2 4.4.4-3.4 3 1 4.4-3.8-2.4-3.8 2.4 1-4.4-3.4-3 4.4-.4z"],
  published: ["Published, not counted", "M13 1a5 5 0 1 0 .01 0z"],
  operating: ["Operating point, not trained anew", "M13 1V11M8 6H18"],
  operating_front: ["MoE models with operating points", "M1 6H3M7 6H9M13 6H15M19 6H21M24 6H26"],
  diverged: ["Diverged, on the cost axis", "M9 2L17 10M17 2L9 10"],
};

function buildKey() {
  const marks = Object.entries(MARKS).filter(([role]) => roles.has(role)).map(([, [label, path, fill = ""]]) => {
    const span = element("span");
    span.innerHTML = `<svg viewBox="0 0 26 12"><path class="${fill}" d="${path}"/></svg>`;
    span.append(label);
    return span;
  });
  document.getElementById("key").append(...marks);
}

function draw() {
  const words = search.value.toLowerCase().split(/\s+/);
  state.shown = data.points.map((point, i) => !state.hidden.has(point.family)
    && !hiddenStandings.has(standings[i]) && words.every(word => texts[i].includes(word)));
  const listed = state.shown.map((on, i) => on && (!state.frontierOnly || standings[i] === "frontier"));
  drawTable(listed);
  counts.textContent = `${listed.filter(Boolean).length} of ${listed.length} shown`;
  drawPlots(state);
}

buildFilters();
buildKey();
draw();
filters.addEventListener("submit", event => event.preventDefault());
search.addEventListener("input", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
