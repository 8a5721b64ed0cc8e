// Draws each figure in the colours of the page, and again when dark mode changes.
const darkness = matchMedia("(prefers-color-scheme: dark)");
function makeTemplate() {
  const page = getComputedStyle(document.documentElement);
  const colour = name => page.getPropertyValue(name).trim();
  const axis = { gridcolor: colour("--grid"), linecolor: colour("--line"),
    zerolinecolor: colour("--grid"), fixedrange: true };
  return { layout: { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--front"), size: 13,
      family: getComputedStyle(document.body).fontFamily },
    xaxis: axis, yaxis: axis, annotationdefaults: { font: { color: colour("--soft") } },
    hoverlabel: { align: "left", bgcolor: colour("--panel"), bordercolor: colour("--line"),
      font: { color: colour("--front") }, namelength: -1 } } };
}
function drawAll() {
  const template = makeTemplate();
  for (const box of document.querySelectorAll("[data-figure]")) {
    const figure = figures[Number(box.dataset.figure)];
    Plotly.react(box, figure.data, { ...figure.layout, template },
      { responsive: true, displayModeBar: false });
  }
}
drawAll();
darkness.addEventListener("change", drawAll);
