// Draws the charts of a page. Everything else works without scripts.
"use strict";

const scripts = new Map(); // by address, a promise that ends when the script has run

function load(address) {
  if (!scripts.has(address)) {
    scripts.set(address, new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = address;
      script.onload = resolve;
      script.onerror = reject;
      document.head.append(script);
    }));
  }
  return scripts.get(address);
}

// The page's own colours and font, light or dark.
function chartStyle(element) {
  const style = getComputedStyle(element);
  const of = (name) => style.getPropertyValue(name).trim();
  const text = { labelColor: of("--muted"), titleColor: of("--muted") };
  return {
    background: "transparent",
    font: style.fontFamily,
    view: { stroke: null },
    axis: { ...text, labelFontSize: 13, titleFontSize: 13, titleFontWeight: "normal" },
    axisX: { gridColor: of("--line"), domain: false, tickColor: of("--line"), tickCount: 5 },
    axisY: { grid: false, labelColor: of("--ink"), labelLimit: element.clientWidth / 3 },
    bar: { color: of("--bar"), cornerRadiusEnd: 2 },
    rule: { color: of("--ink") },
    tick: { color: of("--ink") },
  };
}

async function draw(element) {
  for (const address of element.dataset.scripts.split(" ")) await load(address);
  const answer = await fetch(element.dataset.chart);
  if (!answer.ok) return;
  element.drawing?.finalize();
  element.drawing = await vegaEmbed(element, await answer.json(), {
    mode: "vega-lite",
    renderer: "svg",
    ast: true, // expressions are interpreted: the page forbids eval
    actions: false,
    tooltip: false,
    defaultStyle: false,
    config: chartStyle(element),
  });
  element.dataset.drawn = "yes";
}

function drawAll(again) {
  for (const element of document.querySelectorAll("[data-chart]")) {
    if (again || !element.started) {
      element.started = true;
      draw(element).catch(() => element.setAttribute("hidden", ""));
    }
  }
}

// After the page has loaded: the chart scripts take longer than the page itself.
if (document.readyState === "complete") drawAll(false);
else addEventListener("load", () => drawAll(false));
document.addEventListener("htmx:after:swap", () => drawAll(false));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(true));
