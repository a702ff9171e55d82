"use strict";

// Every text from outside goes through textContent; nothing is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600;
const HEIGHT = 100;
const view = { key: null, at: null, data: null, failedSince: null, timer: 0, asking: false, again: false };

const byId = (id) => document.getElementById(id);

function set(id, text, className) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
  if (className !== undefined) node.className = className;
}

function count(value) {
  return value === null || value === undefined ? "?" : Math.round(value).toLocaleString("en");
}

function percent(value) {
  return value === null || value === undefined ? "?" : `${(100 * value).toFixed(0)} %`;
}

function duration(value) {
  if (value === null || value === undefined) return "?";
  return value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(1)} s`;
}

function clock(seconds) {
  if (seconds === null || seconds === undefined) return "never";
  if (seconds < 1e9) return `${seconds.toFixed(1)} s`;
  return new Date(1000 * seconds).toLocaleTimeString("en-GB");
}

function tone(row) {
  if (row.status === "waiting" || row.status === "unseen") return "dim";
  if (row.gate === "healthy") return "calm";
  return row.gate === "not_enough_evidence" ? "unsure" : "bad";
}

// Lines of one plot; unknown is a gap, and a value holds until the next look.
function trace(times, values, start, end, top, holds) {
  let path = "";
  let last = null;
  for (let i = 0; i < times.length; i += 1) {
    const value = values[i];
    if (value === null || value === undefined) {
      last = null;
      continue;
    }
    const x = (WIDTH * (times[i] - start)) / (end - start);
    const y = HEIGHT - HEIGHT * Math.min(Math.max(value / top, 0), 1);
    if (last === null || times[i] - times[last] > holds) {
      path += `M${x.toFixed(1)} ${y.toFixed(1)}h0.8`;
    } else {
      path += `H${x.toFixed(1)}V${y.toFixed(1)}`;
    }
    last = i;
  }
  return path;
}

function plot(id, curves, names, fixedTop, topText) {
  const svg = byId(id);
  const known = names.flatMap((name) => (curves[name] || []).filter((value) => value !== null));
  const top = fixedTop || known.reduce((most, value) => Math.max(most, value), 1);
  const nodes = [];
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const span = curves.end_s - curves.start_s;
  const holds = Math.max(curves.hold_s, (2 * span) / Math.max(curves.t_seconds.length, 1));
  for (const at of curves.restarted_at_seconds) {
    const line = document.createElementNS(SVG, "line");
    const x = String((WIDTH * (at - curves.start_s)) / span);
    for (const [name, value] of [["x1", x], ["x2", x], ["y1", "0"], ["y2", String(HEIGHT)]]) {
      line.setAttribute(name, value);
    }
    nodes.push(line);
  }
  names.forEach((name, index) => {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", `c${index}`);
    path.setAttribute("data-curve", name);
    path.setAttribute("d", trace(curves.t_seconds, curves[name], curves.start_s, curves.end_s, top, holds));
    nodes.unshift(path);
  });
  svg.replaceChildren(...nodes);
  const limit = fixedTop ? topText : count(top);
  return known.length ? `; top of the plot ${limit}` : "; unknown over this time";
}

function title(id, parts) {
  const nodes = parts.map(([text, className]) => {
    const node = document.createElement("span");
    node.textContent = text;
    if (className) node.className = className;
    return node;
  });
  byId(id).replaceChildren(...nodes);
}

function drawCurves(row, curves, head) {
  if (!row || !curves) {
    for (const name of ["kv", "waiting", "blocks"]) byId(name).replaceChildren();
    title("kv-title", [["KV: no sample yet", "dim"]]);
    title("waiting-title", [["waiting", "dim"]]);
    title("blocks-title", [["blocks", "dim"]]);
    return;
  }
  const kvNote = plot("kv", curves, ["kv_usage_share"], 1, "100 %");
  title("kv-title", [
    ["KV ", ""], [percent(row.kv_usage_share), "c0"],
    [` of: ${row.kv_usage_is_share_of || "unknown"}${kvNote}`, "dim"],
  ]);
  const waitingNote = plot(
    "waiting", curves,
    ["waiting_requests", "waiting_capacity_requests", "waiting_deferred_requests"],
  );
  const reasons = row.waiting_by_reason;
  const parts = [["waiting ", ""], [count(row.waiting_requests), "c0"]];
  if (reasons.capacity === null && reasons.deferred === null) {
    parts.push([" (reasons unknown)", "dim"]);
  } else {
    parts.push([" = ", ""], [`capacity ${count(reasons.capacity)}`, "c1"]);
    parts.push([" + ", ""], [`deferred ${count(reasons.deferred)}`, "c2"]);
  }
  title("waiting-title", [...parts, [waitingNote, "dim"]]);
  const needs = row[`head_needs_${row.unit}`];
  const isKnown = needs !== null && needs !== undefined;
  const blocksNote = plot("blocks", curves, ["available", isKnown ? "head" : "longest"]);
  title("blocks-title", [
    [`${row.unit}: `, ""], [`available ${count(row[`available_${row.unit}`])}`, "c0"], [", ", ""],
    [isKnown ? `head needs ${count(needs)}` : `head at most ${count(row[`longest_request_${row.unit}`])}`, "c1"],
    [` (${head})${blocksNote}`, "dim"],
  ]);
}

function drawVerdict(row) {
  if (!row) {
    set("verdict-gate", "nothing is watched", "dim");
    return;
  }
  const also = row.also.length ? ` (also ${row.also.join(", ")})` : "";
  set("verdict-gate", row.gate + (row.status === "ok" ? also : ""), tone(row));
  const who = [`${row.endpoint} ${row.label}`.trim(), row.engine];
  if (row.confidence !== null) who.push(`confidence ${row.confidence.toFixed(2)}`);
  if (row.status !== "ok" && row.since_s !== null) who.push(`since ${clock(row.since_s)}`);
  if (row.restarts) who.push(`${row.restarts} restarts seen`);
  set("verdict-who", who.filter(Boolean).join(", "));
  set("verdict-arithmetic", row.status === "unreachable" ? row.reason : row.arithmetic);
  const advice = row.advice.map((text) => {
    const item = document.createElement("li");
    item.textContent = text;
    return item;
  });
  byId("verdict-advice").replaceChildren(...advice);
}

function cell(text, className) {
  const node = document.createElement("td");
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

function rowNode(row) {
  const node = document.createElement("tr");
  const name = document.createElement("td");
  const choose = document.createElement("button");
  choose.type = "button";
  choose.textContent = `${row.endpoint} ${row.label}`.trim();
  choose.dataset.key = row.key;
  choose.addEventListener("click", () => {
    view.key = row.key;
    ask();
  });
  name.append(choose);
  node.append(name, cell(row.gate, tone(row)));
  if (row.key === view.key) {
    node.className = "chosen";
    node.setAttribute("aria-current", "true");
  }
  if (row.status === "ok") {
    node.append(
      cell(percent(row.kv_usage_share)), cell(count(row.running_requests), "more"),
      cell(count(row.waiting_requests)), cell(count(row.preemptions), "more"),
      cell(duration(row.ttft_seconds), "more"), cell(percent(row.hit_share), "more"),
    );
  } else {
    const why = row.since_s === null ? "" : `since ${clock(row.since_s)} ${row.reason}`;
    const rest = cell(why, "dim");
    rest.colSpan = 6;
    node.append(rest);
  }
  return node;
}

function drawRows(rows) {
  const focused = document.activeElement && document.activeElement.dataset
    ? document.activeElement.dataset.key : undefined;
  byId("rows").replaceChildren(...rows.map(rowNode));
  if (focused !== undefined) {
    const again = [...document.querySelectorAll("#rows button")].find((node) => node.dataset.key === focused);
    if (again) again.focus({ preventScroll: true });
  }
}

function drawTime(data) {
  const slider = byId("at");
  slider.disabled = data.from_s === null || data.from_s === data.to_s;
  if (data.from_s !== null) {
    slider.min = data.from_s;
    slider.max = data.to_s;
    if (view.at === null) slider.value = data.to_s;
  }
  const now = data.is_live ? `${clock(data.now_s)} live` : `${clock(data.to_s)}, the end`;
  set("at-text", view.at === null ? now : clock(view.at));
}

function draw(data) {
  const rows = data.replicas;
  const row = rows.find((item) => item.key === view.key) || null;
  const down = data.unreachable ? `, ${data.unreachable} unreachable` : "";
  const kind = data.is_live ? "endpoint" : "recording";
  set("summary", `${data.endpoints} ${kind}${data.endpoints > 1 ? "s" : ""}${down}`);
  drawVerdict(row);
  drawTime(data);
  drawCurves(row, data.curves, data.head);
  drawRows(rows);
  byId("notes").replaceChildren(...data.notes.map((text) => {
    const item = document.createElement("li");
    item.textContent = text;
    return item;
  }));
}

function past() {
  const asked = Number(byId("seconds").value);
  if (asked > 0) return asked;
  const data = view.data;
  return data && data.from_s !== null ? Math.max(data.to_s - data.from_s, 1) : 600;
}

async function ask() {
  if (view.asking) {
    view.again = true;
    return;
  }
  view.asking = true;
  window.clearTimeout(view.timer);
  try {
    const query = new URLSearchParams({ seconds: String(past()) });
    if (view.key !== null) query.set("key", view.key);
    if (view.at !== null) query.set("at", String(view.at));
    const answer = await fetch(`/state.json?${query}`, { signal: AbortSignal.timeout(15000) });
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    const data = await answer.json();
    const isNew = view.key === null || !data.replicas.some((row) => row.key === view.key);
    if (isNew && data.replicas.length) {
      // An endpoint that had no replica yet has one now, or nothing was chosen.
      const same = data.replicas.find((row) => view.key !== null && row.key.startsWith(`${view.key}:`));
      view.key = (same || data.replicas[0]).key;
      view.again = true;
    }
    if (!data.is_live && view.data === null) byId("seconds").value = "0";
    view.data = data;
    view.failedSince = null;
    byId("trouble").hidden = true;
    draw(data);
  } catch (error) {
    view.failedSince = view.failedSince || Date.now() / 1000;
    set("trouble", `kvcatch watch does not answer since ${clock(view.failedSince)}: ${error.message}`);
    byId("trouble").hidden = false;
  }
  view.asking = false;
  const again = view.again;
  view.again = false;
  const pause = view.data ? 1000 * Math.min(Math.max(view.data.interval_s, 1), 10) : 1000;
  const isStill = view.data !== null && !view.data.is_live && view.failedSince === null;
  if (again) ask();
  else if (!isStill) view.timer = window.setTimeout(ask, pause);
}

function go(at) {
  const data = view.data;
  if (!data || data.from_s === null) return;
  view.at = at >= data.to_s ? null : Math.max(at, data.from_s);
  if (view.at !== null) byId("at").value = view.at;
  ask();
}

byId("at").addEventListener("input", () => go(Number(byId("at").value)));
byId("live").addEventListener("click", () => go(Infinity));
byId("seconds").addEventListener("change", ask);
document.addEventListener("keydown", (event) => {
  const target = event.target;
  if (target instanceof HTMLInputElement || target instanceof HTMLSelectElement) return;
  if (event.altKey || event.ctrlKey || event.metaKey || !view.data) return;
  const step = Math.max(view.data.interval_s, past() / 120) * (event.shiftKey ? 10 : 1);
  const at = view.at === null ? view.data.to_s : view.at;
  if (event.key === "ArrowLeft") go(at - step);
  else if (event.key === "ArrowRight") go(at + step);
  else if (event.key === "Home") go(-Infinity);
  else if (event.key === "End") go(Infinity);
  else return;
  event.preventDefault();
});
ask();
