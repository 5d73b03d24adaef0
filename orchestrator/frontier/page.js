// Draws the plots in the colours of the theme, hides deselected families and marks, and sorts the table.
"use strict";

const plots = JSON.parse(document.getElementById("data").textContent);
const filters = document.getElementById("filters");
const rows = [...document.querySelectorAll("tbody tr")];
const config = {
  displaylogo: false,
  responsive: true,
  showSendToCloud: false,  // plotly offers by default to upload the chart to its makers
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
};

// The families or roles that check boxes hide.
function hiddenValues(kind) {
  const boxes = filters.querySelectorAll(`input[data-kind=${kind}]`);
  return new Set([...boxes].filter(box => !box.checked).map(box => box.value));
}

function draw() {
  const families = hiddenValues("family"), roles = hiddenValues("role");
  const shown = ({ role, family }) => !roles.has(role) && !families.has(family);
  const words = filters.querySelector("[type=search]").value.toLowerCase().split(/\s+/);
  for (const row of rows)
    row.hidden = !shown(row.dataset) || !words.every(word => row.textContent.toLowerCase().includes(word));
  filters.querySelector("output").textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length} listed`;
  const style = getComputedStyle(document.documentElement);
  const printing = document.documentElement.classList.contains("print");  // plotly would resize too late
  const colour = name => style.getPropertyValue(name).trim();
  const lines = { gridcolor: colour("--grid"), linecolor: colour("--line"), tickcolor: colour("--line") };
  const ink = { color: colour("--ink") }, clear = "rgba(0,0,0,0)";
  const axis = filters.querySelector("select");  // the first plot is the reader's choice
  document.querySelectorAll(".plot").forEach((plot, i) => {
    const { data, layout } = plots[i || axis?.value || 0];
    const traces = data.map(trace =>
      ({ ...trace, visible: shown(trace.meta), ...(trace.hovertext && { hoverinfo: "none" }),
        ...(trace.text && i && { mode: "lines" }) }));  // small plots have no room for labels
    const first = !plot.on;
    const sheet = { width: plot.clientWidth, height: plot.clientHeight };
    const themed = { ...layout, ...(printing && sheet),
      title: undefined, showlegend: false, paper_bgcolor: clear, plot_bgcolor: clear,
      xaxis: { ...layout.xaxis, ...lines, ...(i && layout.xaxis.nticks && { nticks: 3 }) }, yaxis: { ...layout.yaxis, ...lines }, font: { ...layout.font, ...ink },
      hoverlabel: { ...layout.hoverlabel, bgcolor: colour("--paper"), bordercolor: colour("--muted"), font: ink },
      modebar: { color: colour("--muted"), activecolor: colour("--accent"), bgcolor: clear },
      margin: { l: 70, r: 24, t: 30, b: 48 } };
    Plotly.react(plot, traces, themed, config);
    if (!first) return;
    plot.on("plotly_click", ({ points: [{ customdata: url }] }) => url && window.open(url, "_blank", "noopener"));
    plot.on("plotly_hover", showHover);
    plot.on("plotly_unhover", () => hover.hidden = true);
  });
}

// Shows the text of a point beside the pointer and within the window, which plotly's own labels may leave.
const hover = document.getElementById("hover");
function showHover({ points: [{ hovertext }], event: { clientX, clientY } }) {
  if (!hovertext) return;
  hover.innerHTML = hovertext;  // escaped by figure.py
  hover.hidden = false;
  const { width, height } = hover.getBoundingClientRect(), { clientWidth, clientHeight } = document.documentElement;
  const besides = clientX + 16 + width <= clientWidth ? clientX + 16 : clientX - 16 - width;
  hover.style.left = Math.max(4, Math.min(besides, clientWidth - width - 4)) + "px";
  hover.style.top = Math.max(4, Math.min(clientY + 16, clientHeight - height - 4)) + "px";
}

// Names the best arm within a bound, and those that are not significantly worse: as `answer.py` does.
const bound = document.getElementById("bound"), choices = JSON.parse(document.getElementById("choices").textContent);
function choose() {
  const cost = bound.querySelector("select").value, slider = bound.querySelector("input");
  const uppers = [...new Set(choices.arms.map(each => each.upper[cost]))].sort((a, b) => a - b);
  slider.max = uppers.length - 1;
  const most = uppers[slider.value];
  const within = choices.arms.filter(each => each.upper[cost] <= most).sort((a, b) => b.quality - a.quality);
  const [best, ...others] = within, critical = choices.critical[within.length - 1];
  const tied = others.filter(({ quality, error }) => best.quality - quality <= critical * Math.hypot(best.error, error));
  bound.querySelector("b").textContent = most < 1e5 ? Number(most.toPrecision(3)) : most.toExponential(2);
  bound.querySelector("output").textContent = `${best.arm}, ${best.text}` +
    (best.error && tied.length ? `; not significantly worse: ${tied.map(each => each.arm).join(", ")}` : "");
}
if (bound) {
  bound.addEventListener("input", choose);
  bound.addEventListener("submit", event => event.preventDefault());
  bound.querySelector("input").max = choices.arms.length - 1;
  bound.querySelector("input").value = choices.arms.length - 1;
  choose();
}

// Unknown numbers stay last, whichever the direction.
const collator = new Intl.Collator(undefined, { numeric: true });
function sortBy(column, head) {
  const sign = head.ariaSort === "ascending" ? -1 : 1;
  const key = row => row.cells[column].dataset.key ?? row.cells[column].textContent;
  const compare = head.classList.contains("number") ? (a, b) => a - b : collator.compare;
  rows.sort((a, b) => (key(a) === "") - (key(b) === "") || sign * compare(key(a), key(b)));
  for (const other of head.parentElement.cells) other.ariaSort = null;
  head.ariaSort = sign > 0 ? "ascending" : "descending";
  document.querySelector("tbody").append(...rows);
}

[...document.querySelectorAll("th")].forEach((head, column) =>
  head.querySelector("button").addEventListener("click", () => sortBy(column, head)));
filters.addEventListener("input", draw);
filters.addEventListener("submit", event => event.preventDefault());
for (const event of ["beforeprint", "afterprint"])
  addEventListener(event, () => {
    document.documentElement.classList.toggle("print");
    draw();
    dispatchEvent(new Event("resize"));  // after printing, plots take the size of the window again
  });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
sortBy(2, document.querySelectorAll("th")[2]);
draw();
