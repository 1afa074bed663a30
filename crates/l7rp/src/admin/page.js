// Asks for /status each second and shows it. What comes from there is only ever put into the
// page as text.
"use strict";

const EVERY = 1000;
const PATIENCE = 4000;
const at = (id) => document.getElementById(id);

/** The last two answers, and when the last one came. */
let now = null, before = null, seen = null;

/** Changes the text and class of an element only where they differ, so that a selection stays. */
function put(element, text, kind = "") {
  text = String(text);
  if (element.textContent !== text) element.textContent = text;
  if (element.className !== kind) element.className = kind;
}

/** The child at `ix`, made if there is none. */
function child(parent, ix, tag) {
  return parent.children[ix] || parent.appendChild(document.createElement(tag));
}

function keep(parent, count) {
  while (parent.children.length > count) parent.lastElementChild.remove();
}

/** A table in `parent`: `columns` are `[name, kind]`, cells `[text, kind]`. */
function table(parent, columns, rows) {
  if (!parent.querySelector("table")) {
    const made = parent.appendChild(document.createElement("table"));
    made.appendChild(document.createElement("thead")).appendChild(document.createElement("tr"));
    made.appendChild(document.createElement("tbody"));
  }
  const head = parent.querySelector("thead tr"), body = parent.querySelector("tbody");
  columns.forEach(([name, kind], ix) => put(child(head, ix, "th"), name, kind));
  keep(head, columns.length);
  rows.forEach((cells, rowIx) => {
    const row = child(body, rowIx, "tr");
    cells.forEach(([text, kind], ix) => {
      const cell = child(row, ix, "td");
      const [label, side] = columns[ix];
      if (cell.dataset.label !== label) cell.dataset.label = label;
      const none = side && (text === "0" || text === "0.0") && "zero";
      put(cell, text, [side, kind, none].filter(Boolean).join(" "));
    });
    keep(row, cells.length);
  });
  keep(body, rows.length);
}

const count = (n) => n.toLocaleString("en");
const of = (n, most) => (most ? `${count(n)} / ${count(most)}` : count(n));

function span(ms) {
  const s = Math.floor(ms / 1000);
  if (s < 1) return `${Math.round(ms)} ms`;
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

function millis(ms) {
  if (ms === null) return "–";
  return ms < 10 ? `${ms.toFixed(2)} ms` : ms < 100 ? `${ms.toFixed(1)} ms` : `${Math.round(ms)} ms`;
}

/** What has been added each second to a counter; null: that cannot be known. */
function rate(old, value) {
  const ms = before && before.pid === now.pid ? now.uptime_ms - before.uptime_ms : 0;
  if (ms <= 0 || old === undefined || old > value) return null;
  return ((value - old) * 1000) / ms;
}

function perSecond(rate) {
  if (rate === null) return "…";
  return rate < 10 ? rate.toFixed(1) : count(Math.round(rate));
}

const named = (list, name) => (list || []).find((one) => one.name === name);
const sum = (list, what) => list.reduce((total, one) => total + what(one), 0);
const errors = (route) => route.by_class["5xx"];

function state() {
  if (now.draining) return ["▲ draining: it will end", "warn"];
  if (now.ready) return ["✔ ready", "good"];
  return [`✘ not ready: ${now.why_unready}`, "bad"];
}

function figures() {
  const old = before && before.routes;
  const total = (what) =>
    rate(old ? sum(now.routes, (r) => (named(old, r.name) ? what(named(old, r.name)) : what(r))) : undefined,
      sum(now.routes, what));
  const requests = total((r) => r.requests), failed = total(errors);
  const all = [
    ["requests/s", perSecond(requests)],
    ["errors/s (5xx)", perSecond(failed), failed > 0 ? "bad" : ""],
    ["in flight", of(now.in_flight, now.max_in_flight)],
    ["connections", count(now.connections)],
    ["tunnels", count(now.tunnels)],
    ["up for", span(now.uptime_ms)],
    ["workers", count(now.workers)],
    ["process", now.pid],
  ];
  if (now.log_lines_dropped) all.push(["log lines dropped", count(now.log_lines_dropped), "warn"]);
  if (now.panics) all.push(["panics caught", count(now.panics), "bad"]);
  const list = at("figures");
  all.forEach(([name, text, kind], ix) => {
    const box = child(list, ix, "div");
    put(child(box, 0, "dt"), name);
    put(child(box, 1, "dd"), text, kind);
  });
  keep(list, all.length);
}

function config() {
  const c = now.config;
  const taken = new Date(c.taken).toLocaleString();
  let text = `Configuration ${c.generation}, in force since ${taken}. `;
  text += `Reloads: ${c.reloads} taken, ${c.rejected} refused.`;
  if (c.last_rejected && c.last_error !== null) {
    text = `▲ The last reload was refused: ${c.last_error}. Still in force: ${text}`;
  }
  put(at("config"), text, c.last_rejected ? "warn" : "");
}

const N = "number";

function routes() {
  const rows = now.routes.map((route) => {
    const old = named(before && before.routes, route.name);
    const requests = rate(old && old.requests, route.requests);
    const failed = rate(old && errors(old), errors(route));
    const c = route.by_class;
    return [
      [route.name],
      [`${route.host === null ? "any host" : route.host} ${route.path_prefix}`],
      [route.pool === null ? route.action : `pool ${route.pool}`],
      [perSecond(requests)],
      [perSecond(failed), failed > 0 ? "bad" : ""],
      [count(route.requests)],
      [count(c["2xx"])],
      [count(c["3xx"])],
      [count(c["4xx"])],
      [count(c["5xx"])],
      [count(route.rate_limited), route.rate_limited ? "warn" : ""],
    ];
  });
  table(at("routes"), [["route"], ["for"], ["goes to"], ["requests/s", N], ["errors/s", N],
    ["requests", N], ["2xx", N], ["3xx", N], ["4xx", N], ["5xx", N], ["rate-limited", N]], rows);
}

/** The state of an upstream in words, with a sign for those who do not see colours. */
function standing(upstream) {
  if (!upstream.eligible) return [`✘ out: ${upstream.why_not || "it has just changed"}`, "bad"];
  if (upstream.breaker.forced) return ["▲ in, breaker forced closed by an operator", "warn"];
  if (upstream.breaker.state !== "closed") return ["▲ in, tested by its breaker", "warn"];
  return [upstream.backup ? "✔ in, as a backup" : "✔ in", "good"];
}

function probe(last) {
  if (last === null) return ["none"];
  const words = `${last.good ? "✔" : "✘"} ${last.reason}, ${span(last.ago_ms)} ago, took ${millis(last.took_ms)}`;
  return [words, last.good ? "" : "bad"];
}

function upstreams(parent, pool, old) {
  const rows = pool.upstreams.map((one) => {
    const then = ((old && old.upstreams) || []).find((other) => other.url === one.url);
    const failed = rate(then && then.failures, one.failures);
    return [
      [one.url],
      standing(one),
      probe(one.last_probe),
      [of(one.in_flight, one.max_in_flight)],
      [millis(one.ewma_ms)],
      [perSecond(rate(then && then.requests, one.requests))],
      [perSecond(failed), failed > 0 ? "bad" : ""],
      [count(one.requests)],
      [count(one.failures)],
      [`${one.connections.active} + ${one.connections.idle} idle`],
      [count(one.weight)],
    ];
  });
  table(parent, [["upstream"], ["state"], ["last probe"], ["in flight", N], ["latency", N],
    ["tries/s", N], ["failures/s", N], ["tries", N], ["failures", N], ["connections", N],
    ["weight", N]], rows);
}

function pools() {
  const list = at("pools");
  now.pools.forEach((pool, ix) => {
    const box = child(list, ix, "div");
    const title = child(box, 0, "h3");
    if (!title.firstChild) title.append("", document.createElement("small"));
    const [name, small] = title.childNodes;
    if (name.data !== pool.name) name.data = pool.name;
    const well = pool.upstreams.filter((one) => one.eligible).length;
    put(small, `${pool.algorithm} · ${well} of ${pool.upstreams.length} in · ` +
      `${of(pool.in_flight, pool.max_in_flight)} in flight` +
      (pool.budget_exhausted ? ` · ${count(pool.budget_exhausted)} tries beyond the budget` : ""),
      well ? "" : "bad");
    upstreams(box, pool, named(before && before.pools, pool.name));
  });
  keep(list, now.pools.length);
}

function listeners() {
  const rows = now.listeners.map((one) => {
    const days = (c) => Math.floor(c.expires_in_s / 86400);
    const expiry = (c) => `${c.host}: ${days(c) < 0 ? "✘ expired" : `${days(c)} days left`}`;
    const soonest = Math.min(...one.certificates.map(days));
    return [
      [one.name],
      [one.bind],
      [one.protocols.join(", ") + (one.tls ? " over TLS" : "")],
      [of(one.connections, one.max_connections)],
      [of(one.in_flight, one.max_in_flight)],
      [count(one.no_route)],
      [count(one.bad_requests)],
      [count(one.shed), one.shed ? "warn" : ""],
      [one.certificates.map(expiry).join("; "), soonest < 0 ? "bad" : soonest < 14 ? "warn" : ""],
    ];
  });
  table(at("listeners"), [["listener"], ["bind"], ["speaks"], ["connections", N], ["in flight", N],
    ["no route", N], ["bad requests", N], ["shed", N], ["certificates"]], rows);
}

function show() {
  put(at("version"), now.version);
  const [words, kind] = state();
  put(at("state"), words, kind);
  document.title = `l7rp: ${words}`;
  for (const part of [figures, config, routes, pools, listeners]) part();
}

function lost(why) {
  const alarm = at("alarm");
  const since = seen === null ? "" : ` since ${seen.toLocaleTimeString()}; what is below is from then`;
  put(alarm, `✘ The proxy cannot be reached${since}. ${why}. Trying again.`, "alarm");
  alarm.hidden = false;
  put(at("state"), "✘ not reached", "bad");
  document.title = "l7rp: not reached";
  at("main").className = "stale";
}

async function ask() {
  try {
    const answer = await fetch("/status", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
    if (!answer.ok) throw new Error(`It answers ${answer.status}`);
    const next = await answer.json();
    [before, now, seen] = [now, next, new Date()];
    at("alarm").hidden = true;
    at("main").className = "";
    show();
  } catch (e) {
    lost(e.name === "TimeoutError" ? `It is silent for ${PATIENCE / 1000} s` : e.message);
  }
  setTimeout(ask, EVERY);
}

ask();
