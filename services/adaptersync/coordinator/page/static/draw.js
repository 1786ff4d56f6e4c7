// How things are shown: elements, figures, charts. Knows nothing of the fleet. Whatever comes from outside becomes text
// of a node, never markup.

export function element(name, options = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key === "class") made.className = value;
    else if (key === "title" || key === "value" || key === "hidden") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined).map((child) =>
    child instanceof Node ? child : document.createTextNode(String(child))));
  return made;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  for (const [limit, unit, size] of [[300, "s", 1], [7200, "min", 60], [172800, "h", 3600]])
    if (seconds < limit) return `${Math.round(seconds / size)} ${unit}`;
  return `${Math.round(seconds / 86400)} d`;
}

export function figure(value, digits = 1) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return Number.isInteger(value) ? String(value) : value.toFixed(value >= 100 ? 0 : digits);
}

export function clock(at, fine = false) {
  const time = new Date(at * 1000);
  const text = time.toLocaleTimeString("en-GB", { hour12: false });
  return fine ? `${text}.${String(time.getMilliseconds()).padStart(3, "0")}` : text;
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Table with columns of [title, class]; each row is a list of cells, the first of which is its head.
export function fill(table, columns, rows, empty) {
  table.tHead.replaceChildren(element("tr", {}, ...columns.map(([title, kind]) =>
    title instanceof Node ? title : element("th", { class: kind || "", scope: "col" }, title))));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((cell, place) => {
    const kind = (columns[place] || [])[1] || "";
    return place ? element("td", { class: kind }, cell) : element("th", { class: kind, scope: "row" }, cell);
  })));
  if (!rows.length) body.push(element("tr", {}, element("td", { class: "empty", colspan: columns.length || 1 }, empty)));
  table.tBodies[0].replaceChildren(...body);
}

// The axis has room for what `figure` says at its longest, "999.9 M", in every font; one width keeps charts in line.
export function chart(section, series, scales = {}) {
  const width = () => Math.max(200, section.clientWidth - 28);
  const axis = (more) => ({ stroke: () => colour("--quiet"), grid: { stroke: () => colour("--line"), width: 1 },
    ticks: { stroke: () => colour("--line"), width: 1 }, font: "12px system-ui, sans-serif", ...more });
  const second = Object.keys(scales).find((name) => name !== "y");
  const options = {
    width: width(), height: 190, scales: { x: { time: true }, y: { range: (_plot, _low, high) => [0, high > 0 ? high * 1.08 : 1] }, ...scales },
    cursor: { sync: { key: "fleet" }, drag: { x: false, y: false } },
    axes: [
      axis({ space: 70, values: (_plot, splits) => splits.map((at) => clock(at)) }),
      axis({ size: 66, values: (_plot, splits) => splits.map((value) => figure(value)) }),
      ...(second ? [axis({ scale: second, side: 1, size: 44, grid: { show: false }, values: (_plot, splits) => splits.map((value) => figure(value)) })] : []),
    ],
    series: [{ label: "time", value: (_plot, at) => (at === null ? "–" : clock(at)) },
      ...series.map((one) => ({ label: one.label, scale: one.scale || "y", width: 1.75, spanGaps: false, points: { show: false },
        stroke: () => colour(one.colour), value: (_plot, value) => figure(value, 2), ...(one.dash ? { dash: one.dash } : {}) }))],
  };
  const plot = new uPlot(options, [[], ...series.map(() => [])], section);
  new ResizeObserver(() => { if (plot.width !== width()) plot.setSize({ width: width(), height: 190 }); }).observe(section);
  return plot;
}
