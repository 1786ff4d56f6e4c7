// Asks one coordinator for the fleet, and is told events as they come.
import { chart, clock, duration, element, figure, fill } from "/draw.js";

const EVERY_MS = 2000, POINTS = 900, EVENTS = 200;
const $ = (id) => document.getElementById(id);
const GOOD = { ready: "good", current: "good", retained: "good", promoted: "good", alive: "good" };
const BAD = { ejected: "bad", rolled_back: "bad", voided: "bad", silent: "bad", gone: "bad", unknown: "bad" };
const WARN = { joining: "warn", draining: "warn", staging: "warn", published: "warn" };
const MARK = { held: "✓", awaited: "…", refused: "✕", loaded: "○" };
const PHASE = { gather: "trainer", save: "trainer", digest: "trainer", publish: "trainer", queued: "queue", "taken up": "queue", noticed: "queue",
  visible: "bytes", staged: "bytes", verified: "bytes", loaded: "load", proved: "proof", committed: "commit", gate: "commit" };
const GROUPS = [["trainer", "gathered, saved, announced"], ["queue", "waiting"], ["bytes", "seen, staged, verified"], ["load", "loaded"], ["proof", "proved"], ["commit", "committed, gate"]];
const CHARTS = [
  ["requests", [["requests_s", "requests", "--c1"], ["refused_s", "refused", "--c3"], ["failed_s", "failed", "--c5"]]],
  ["tokens", [["completion_tokens_s", "generated", "--c2"], ["prompt_tokens_s", "of prompts", "--c1"]]],
  ["routing", [["affinity_s", "affinity", "--c2"], ["session_s", "session", "--c6"], ["cold_s", "cold", "--c1"], ["spill_s", "spill", "--c3"], ["local_s", "alone", "--c5"]]],
  ["load", [["in_flight", "in flight", "--c1"], ["imbalance", "imbalance", "--c4", "ratio"]], { ratio: { range: (_plot, _low, high) => [1, Math.max(2, (high || 1) * 1.08)] } }],
];
let series = {}, last = 0, shown = {}, plots = {}, fleet = null, answered = 0, source = null;

const badge = (word) => element("span", { class: `badge ${GOOD[word] || BAD[word] || WARN[word] || ""}` }, word.replace("_", " "));

// Draws a part anew only where what it shows has changed: so that a selection or a place in a list stays.
function part(name, data, draw) {
  const text = JSON.stringify(data);
  if (shown[name] !== text) { shown[name] = text; draw(); }
}

function show(now) {
  fleet = now;
  document.title = `${now.healthy ? "" : "! "}${now.group} · adaptersync`;
  $("group").textContent = now.group;
  $("health").textContent = now.healthy ? "healthy" : "needs attention";
  $("health").className = `badge ${now.healthy ? "good" : "bad"}`;
  const mine = now.told_by === now.leader ? "this one" : `${now.told_by}, standby`;
  $("leader").textContent = `${now.leader ? `${now.leader} leads` : "nobody leads"} (told by ${mine}) · generation ${now.generation}`;
  part("alarms", now.problems, () => {
    $("alarms").hidden = !now.problems.length;
    $("alarms").querySelector("ul").replaceChildren(...now.problems.map((problem) => element("li", {}, problem)));
  });
  part("waits", now.waits.map((wait) => [wait.version, wait.waits_for, Math.round(wait.left_s ?? -1)]), () => {
    $("waits").hidden = !now.waits.length;
    $("waits").querySelector("ul").replaceChildren(...now.waits.map((wait) =>
      element("li", {}, element("b", {}, wait.version), " ", badge(wait.state), ` waits for ${wait.waits_for}`, wait.left_s === null ? "" : `, at most ${duration(wait.left_s)}`)));
  });
  tiles(now);
  matrix(now);
  part("promotions", now.promotions, () => promotions(now.promotions));
  runs(now);
  operate(now);
}

function tiles(now) {
  const at = (name) => { const line = series[name] || []; return line.length ? line[line.length - 1] : null; };
  const ready = now.replicas.filter((one) => one.state === "ready").length;
  const told = [
    ["replicas ready", `${ready} / ${now.replicas.length}`], ["requests a second", figure(at("requests_s"))], ["failed a second", figure(at("failed_s"), 2)],
    ["tokens a second", figure(at("completion_tokens_s"))], ["of prompts cached", at("cached") === null ? "–" : `${Math.round(at("cached") * 100)} %`],
    ["in flight", figure(at("in_flight"))], ["imbalance", figure(now.imbalance, 2)], ["versions on their way", figure(at("behind"))],
  ];
  part("tiles", told, () => $("tiles").replaceChildren(...told.map(([name, value]) => element("div", { class: `tile ${name.startsWith("failed") && at("failed_s") > 0 ? "bad" : ""}` }, element("b", {}, value), element("span", {}, name)))));
}

function matrix(now) {
  const age = (seconds) => duration(seconds);
  const columns = [["replica", ""], ["state", ""], ...now.versions.map((one) => [
    element("th", { class: `mark ${one.state === "current" ? "hot" : ""}`, scope: "col", title: one.version }, element("span", {}, one.run), element("span", {}, `v${one.seq}`), badge(one.state)), "mark"]),
    ["slots", "number"], ["heard", "number"], ["cache", ""], ["why", "why"]];
  const rows = now.replicas.map((one) => [one.replica, badge(one.state), ...(now.matrix[one.replica] || []).map((cell) =>
    element("span", { class: `cell ${cell.state || ""}`, title: [cell.state, cell.verdict, cell.reason].filter(Boolean).join(": ") }, MARK[cell.state] || "·")),
    one.slots, age(one.age_s), one.cache.followed ? `${figure(one.cache.blocks)} blocks` : "as routed", one.reason]);
  part("matrix", [now.versions.map((one) => [one.version, one.state]), now.matrix, now.replicas.map((one) => [one.replica, one.state, one.reason, one.slots, Math.round(one.age_s ?? -1), one.cache.blocks])],
    () => fill($("matrix").querySelector("table"), columns, rows, "no replicas"));
}

function promotions(ways) {
  const from = (way) => Math.min(0, ...way.spans.filter((span) => PHASE[span.phase]).map((span) => span.start_s));
  const to = (way) => Math.max(0, ...way.spans.filter((span) => PHASE[span.phase]).map((span) => span.start_s + span.seconds));
  const longest = Math.max(0.001, ...ways.map((way) => to(way) - from(way)));
  const space = "http://www.w3.org/2000/svg";
  const rows = ways.map((way) => {
    const bar = document.createElementNS(space, "svg");
    bar.setAttribute("viewBox", "0 0 1000 14");
    bar.setAttribute("preserveAspectRatio", "none");
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", way.spans.map((span) => `${span.phase} ${duration(span.seconds)}`).join(", "));
    for (const span of way.spans.filter((one) => PHASE[one.phase] && one.seconds > 0)) {
      const box = document.createElementNS(space, "rect"), said = document.createElementNS(space, "title");
      box.setAttribute("x", String(((span.start_s - from(way)) / longest) * 1000));
      box.setAttribute("width", String(Math.max(1.5, (span.seconds / longest) * 1000)));
      box.setAttribute("height", "14");
      box.setAttribute("class", `p-${PHASE[span.phase]}`);
      said.textContent = `${span.phase}: ${duration(span.seconds)}`;
      box.append(said);
      bar.append(box);
    }
    const answers = `${way.accepted} accepted${way.refused ? `, ${way.refused} refused` : ""}${way.slowest ? `, last ${way.slowest}` : ""}`;
    return element("div", { class: "way", title: way.reason || way.version }, element("span", { class: "version" }, way.version), badge(way.outcome),
      element("span", { class: "bar" }, bar), element("span", { class: "took" }, duration(way.promoted_s)), element("span", { class: "slowest quiet" }, way.reason || answers));
  });
  $("promotions").querySelector(".rows").replaceChildren(...(rows.length ? rows : [element("p", { class: "empty" }, "nothing was published yet")]));
}

function runs(now) {
  const columns = [["run", ""], ["current", ""], ["for", "number"], ["replicas", "number"], ["on its way", ""], ["waiting", "number"], ["trainer", ""]];
  const rows = now.runs.map((one) => [one.run, one.current || "none", duration(one.since_s), `${one.replicas}/${one.ready}`, one.candidate, one.waiting, badge(one.trainer)]);
  part("runs", rows.map((cells) => cells.map((cell) => cell instanceof Node ? cell.textContent : cell)), () => fill($("runs").querySelector("table"), columns, rows, "no runs yet"));
  const told = [["router", ""], ["in flight", "number"], ["behind", "number"], ["heard", "number"], ["address", ""]];
  const lines = now.routers.map((one) => [one.router, one.inflight, one.behind, duration(one.age_s), one.url]);
  part("routers", lines, () => fill($("routers").querySelector("table"), told, lines, "no routers"));
}

function draw() {
  const reading = document.querySelector(".u-hz:hover");
  for (const [id, lines] of CHARTS) {
    if (!plots[id] || reading) continue; // somebody reads a value: it shall not move away
    plots[id].setData([series.at, ...lines.map(([name]) => series[name])]);
    plots[id].setLegend({ idx: series.at.length ? series.at.length - 1 : null });
  }
}

function gather(more) {
  if (!Object.keys(series).length) for (const name of Object.keys(more)) series[name] = [];
  for (const [name, line] of Object.entries(more)) series[name] = [...(series[name] || []), ...line].slice(-POINTS);
  if (series.at.length) last = series.at[series.at.length - 1];
}

async function look() {
  try {
    const answer = await fetch(`/api/fleet?since=${last}`, { cache: "no-store" });
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.error || `status ${answer.status}`);
    if (told.at < last) { series = {}; last = 0; return; } // the control server's clock was set back: begin anew
    gather(told.series);
    show(told);
    draw();
    if (!source) { told.events.forEach((event) => happened(event, false)); follow(told.events.length ? told.events[told.events.length - 1].id : ""); }
    answered = Date.now();
    $("lost").hidden = true;
    $("heard").textContent = clock(told.at);
  } catch (error) {
    $("lost").hidden = false;
    $("lost").textContent = `${error.message}: what is shown is ${answered ? `of ${clock(answered / 1000)}` : "nothing yet"}; asking again`;
  }
}

function happened(event, fresh) {
  const kind = event.bad ? "bad" : event.type === "version.promoted" ? "good" : /retir|superseded|verified/.test(event.type) ? "dim" : "";
  const list = $("events").querySelector("ol");
  list.prepend(element("li", { class: `${kind} ${fresh ? "new" : ""}` }, element("time", {}, clock(event.at, true)), element("span", { class: "type" }, event.type),
    element("b", { class: "subject" }, event.subject), element("span", { class: "text" }, event.text)));
  while (list.children.length > EVENTS) list.lastChild.remove();
}

function follow(after) {
  source = new EventSource(`/api/events${after ? `?after=${encodeURIComponent(after)}` : ""}`);
  let latest = after;
  source.onopen = () => { $("stream").textContent = "as they come"; };
  source.onmessage = (message) => { latest = message.lastEventId; happened(JSON.parse(message.data), true); soon(); };
  source.onerror = () => {
    $("stream").textContent = "stream is lost, trying again";
    if (source.readyState === EventSource.CLOSED) setTimeout(() => follow(latest), 10000);
  };
}

let due = 0;
function soon() { if (!due) due = setTimeout(() => { due = 0; look(); }, 300); }

function operate(now) {
  const form = $("operate").querySelector("form");
  const choose = (select, names) => { const chosen = select.value; select.replaceChildren(...names.map((name) => element("option", { value: name }, name || "the one before"))); if (names.includes(chosen)) select.value = chosen; };
  part("operate", [now.runs.map((one) => one.run), now.versions.map((one) => one.version)], () => {
    choose(form.elements.run, now.runs.map((one) => one.run));
    choose(form.elements.version, ["", ...now.versions.map((one) => one.version)]);
  });
}

$("operate").querySelector("form").addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  const form = submitted.target, said = form.querySelector("output"), { kind, run, version, reason, key } = form.elements;
  const mine = fleet && fleet.runs.find((one) => one.run === run.value);
  const asked = { kind: kind.value, run: run.value, version: version.value, reason: reason.value, current: mine ? mine.current : "" };
  if (!confirm(`${kind.selectedOptions[0].textContent}: ${run.value} ${version.value || asked.current}?`)) return;
  try {
    const answer = await fetch("/api/requests", { method: "POST", headers: { authorization: `Bearer ${key.value}` }, body: JSON.stringify(asked) });
    const told = await answer.json();
    said.textContent = answer.ok ? `asked: ${told.request}; events tell what comes of it` : told.error;
  } catch (error) { said.textContent = error.message; }
});

function theme(chosen) {
  if (chosen === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = chosen;
  $("theme").textContent = chosen;
  try { localStorage.setItem("theme", chosen); } catch { /* it is not kept, then */ }
  Object.values(plots).forEach((plot) => plot.redraw(false, true));
}

const themes = ["auto", "light", "dark"];
const wanted = new URLSearchParams(location.search).get("theme");
let kept = null;
try { kept = localStorage.getItem("theme"); } catch { /* not allowed here */ }
for (const [id, lines, scales] of CHARTS)
  plots[id] = chart($(id), lines.map(([, label, colour, scale]) => ({ label, colour, scale })), scales);
theme(themes.includes(wanted) ? wanted : themes.includes(kept) ? kept : "auto");
$("theme").addEventListener("click", () => theme(themes[(themes.indexOf($("theme").textContent) + 1) % themes.length]));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Object.values(plots).forEach((plot) => plot.redraw(false, true)));
$("promotions").querySelector(".phases").replaceChildren(...GROUPS.map(([kind, name]) => element("span", {}, element("i", { class: `p-${kind}` }), name)));
fetch("/api/requests").then((answer) => answer.json()).then((told) => { $("operate").hidden = !told.open; }).catch(() => {});
look();
setInterval(() => { if (!document.hidden) look(); }, EVERY_MS);
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
