// Draws the panels of `data` with what the filters leave of them, in the colours of the theme.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const numberTitles = data.columns.filter(column => column.kind === "number").map(column => column.title);
const plots = data.panels.map((_, i) => document.getElementById("plot" + i));
const MOST_LINES = 18;  // of a hover label: more would not fit beside the plot

function plain(text) {  // plotly reads a few HTML tags in any label
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function hoverText(point) {
  const lines = numberTitles.map((title, i) => [title, point.texts[i]]).concat(point.facts)
    .map(([name, value]) => `${plain(name)}: ${plain(value)}`);
  if (lines.length > MOST_LINES) lines.splice(MOST_LINES, Infinity, "\u2026");
  const place = ["frontier", "dominated"].includes(point.standing) ? "" : ` &nbsp; ${point.standing}`;
  lines.unshift(`<b>${plain(point.arm)}</b> &nbsp; ${plain(data.families[point.family].label)}${place}`);
  return [...lines, "run " + plain(point.runs.map(([id]) => id.slice(0, 12)).join(", "))].join("<br>");
}
const hovers = data.points.map(hoverText);

// Every array of a cloud, cut down to the points that are shown.
function cut(trace, shown) {
  const keep = trace.customdata.flatMap((point, i) => shown[point] ? [i] : []);
  const pick = values => keep.map(i => values[i]);
  const cloud = { ...trace, x: pick(trace.x), y: pick(trace.y), customdata: pick(trace.customdata) };
  cloud.hovertext = cloud.customdata.map(point => hovers[point]);
  if (Array.isArray(trace.marker.size)) cloud.marker = { ...trace.marker, size: pick(trace.marker.size) };
  for (const bars of ["error_x", "error_y"].filter(name => trace[name])) {
    const { array, arrayminus } = trace[bars];
    cloud[bars] = { ...trace[bars], array: pick(array), arrayminus: pick(arrayminus) };
  }
  return cloud;
}

// `state`: shown (one flag a point), hidden (families), familyLines, papers, frontierOnly.
function visible({ role, family }, state) {
  if (role === "family" && !state.familyLines || role === "published" && !state.papers) return false;
  if (state.frontierOnly && ["dominated", "diverged", "confirm", "operating"].includes(role)) return false;
  return !state.hidden.has(family);
}

function theme() {
  const style = getComputedStyle(document.documentElement);
  return name => style.getPropertyValue(name).trim();
}

function themed(layout, colour) {
  const axes = ["xaxis", "yaxis"].map(name => [name, { ...layout[name], gridcolor: colour("--grid"),
    linecolor: colour("--line"), tickcolor: colour("--line") }]);
  return { ...layout, ...Object.fromEntries(axes), font: { ...layout.font, color: colour("--ink") },
    hoverlabel: { ...layout.hoverlabel, bgcolor: colour("--paper"), bordercolor: colour("--muted"),
      font: { ...layout.font, color: colour("--ink") } },
    modebar: { color: colour("--muted"), activecolor: colour("--accent"), bgcolor: "rgba(0,0,0,0)" },
    annotations: layout.annotations?.map(note => ({ ...note, arrowcolor: colour("--muted") })) };
}

const config = {
  displaylogo: false,
  responsive: true,
  showSendToCloud: false,  // plotly 7 offers by default to upload the chart to its makers
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
};

function drawPlot({ traces, layout }, plot, state) {
  const colour = theme();
  const drawn = traces.filter(trace => visible(trace.meta, state)).map(trace => {
    const own = ["front", "operating_front"].includes(trace.meta.role) ? { ...trace, line: { ...trace.line, color: colour("--muted") } } : trace;
    return own.customdata ? cut(own, state.shown) : own;
  });
  const first = !plot.on;
  const done = Plotly.react(plot, drawn.map(trace => ({ type: "scatter", ...trace })), themed(layout, colour), config);
  if (first) plot.on("plotly_click", openRun);
  return done;
}

let latest = 0;

// One plot after the other, so that the page answers in between; a newer call ends an older one.
async function drawPlots(state) {
  const mine = ++latest;
  for (const [i, panel] of data.panels.entries()) {
    await new Promise(resolve => setTimeout(resolve));
    if (mine !== latest) return;
    await drawPlot(panel, plots[i], state);
  }
}

function openRun(event) {
  const point = data.points[event.points[0].customdata];
  const link = point?.runs[0][1];
  if (link) window.open(link, "_blank", "noopener");
}
