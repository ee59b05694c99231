"use strict";
// The second floor: several replicas and a router. A tick is a hundredth of a second of virtual time. What both floors do
// is in page.js, which stands behind this.

const ROUTERS = {"round-robin": "one after the other", "least-loaded": "the fewest requests",
  "two-choices": "the fewer requests, of two that are drawn", "prefix": "follows what was sent where",
  "kv": "asks what is cached, and in use", "sessions": "a hash of the beginning"};
const FLEET = {name: "fleet", title: "A fleet", does: "fleet", pause: 80, live: true,
  sliders: {rate: ["requests per second", 20, 500, 5], replicas: ["replicas", 2, 4],
    shared: ["% that begin like others", 0, 100, 5], beginnings: ["different beginnings", 1, 16],
    num_blocks: ["blocks of a replica", 48, 256, 16], startup: ["ms until replaced", 50, 950, 50]},
  now: (tick, last) => `${(tick / 100).toFixed(2)} of ${last === "?" ? last : (last / 100).toFixed(2)} s`,
  draw() { drawFleet(); drawReplicas(); drawDecisions(); }, totals: fleetTotals,
  knobs: sliders => [...routing(), ...sliders]};
const LANE = 58, HITS = 8, LANES_APART = 14, FIRST = 120;  // pixels: a replica, its cache hits, and the first tokens below
const WINDOW = 20;  // ticks, whose first tokens the percentiles are of

const tint = number => LETTERS[number % LETTERS.length];  // a replica's colour is that of a letter

function served(frame, lane) {  // the number of the replica that has this place
  return Object.keys(frame.replicas).find(number => page.run.lanes[number] === lane);
}

function drawFleet() {
  const {run, tick} = page, {frames, setup} = run, until = page.guessed ? frames.length : tick + 1;
  const cell = page.cell = Math.max(2, Math.min(14, ($("line").clientWidth - LEFT - 4) / frames.length));
  const below = AXIS + setup.replicas * (LANE + HITS + LANES_APART), height = below + FIRST + 8;
  const width = LEFT + frames.length * cell + 2, x = t => LEFT + t * cell;
  const picture = svg("svg", {width, height, role: "img",
    "aria-label": "time line: a row for each replica, first tokens below"});
  const draw = (tag, attributes, ...inside) => picture.append(svg(tag, attributes, ...inside));
  const write = (left, y, text, name = "", anchor = "middle") =>
    draw("text", {x: left, y, "text-anchor": anchor, class: name}, text);
  const bar = (t, y, h) => `M${x(t)} ${y}h${cell}v${-h}h${-cell}z`;
  draw("rect", {x: x(tick), y: 0, width: cell, height, class: "now"});
  for (let t = 0; t < frames.length; t += cell < 4 ? 20 : 10) write(x(t), 12, `${t / 100} s`);

  const asked = {}, seen = frames.slice(0, until);  // by replica and frame: cached tokens, prompt tokens
  for (const [, number, t, , cached, prompt] of run.requests) {
    const sums = (asked[number] ||= {})[t] ||= [0, 0];
    sums[0] += cached;
    sums[1] += prompt;
  }
  const most = Math.max(8, ...seen.flatMap(frame => Object.values(frame.replicas).map(([waits, runs]) => waits + runs)));
  for (let lane = 0; lane < setup.replicas; lane++) {
    const base = AXIS + lane * (LANE + HITS + LANES_APART) + LANE, paths = {decode: "", waits: "", cached: "", prefill: ""};
    let use = "", before;
    seen.forEach((frame, t) => {
      const number = served(frame, lane);
      if (number === undefined) {
        if (before !== undefined) write(x(t) + 6, base - 6, "✕", "cross");
        before = undefined;
        return;
      }
      const [waits, runs, blocks] = frame.replicas[number], [cached, prompt] = (asked[number] || {})[t] || [0, 0];
      const high = runs / most * LANE, y = base - LANE * blocks / setup.num_blocks;
      if (runs) paths.decode += bar(t, base, high);
      if (waits) paths.waits += bar(t, base - high, waits / most * LANE);
      if (cached) paths.cached += bar(t, base + 2 + HITS, HITS * cached / prompt);
      if (prompt) paths.prefill += bar(t, base + 2 + HITS - HITS * cached / prompt, HITS * (1 - cached / prompt));
      use += `${before === number ? "L" : "M"}${x(t)} ${y}H${x(t + 1)}`;
      before = number;
    });
    for (const [name, d] of Object.entries(paths)) draw("path", {d: d || "M0 0", class: name});
    draw("path", {d: use || "M0 0", class: "use"});
    draw("path", {d: `M${LEFT} ${base + 1}H${width}`, class: "rule"});
    const here = served(frames[tick], lane);
    if (here === undefined) continue;
    draw("rect", {x: 3, y: base - 30, width: 22, height: 22, rx: 5, fill: colour(tint(here))});
    draw("text", {x: 14, y: base - 15, "text-anchor": "middle", style: `fill:${ink(tint(here))};font-weight:700`}, here);
  }
  drawFirstTokens(draw, write, below, x, run.requests.filter(request => request[2] < until), until);
  const scrolled = $("line").scrollLeft;
  $("line").replaceChildren(picture);
  $("line").scrollLeft = scrolled;
}

function percentile(values, percent) {
  return [...values].sort((a, b) => a - b)[Math.max(0, Math.ceil(values.length * percent / 100) - 1)];
}

function drawFirstTokens(draw, write, top, x, requests, until) {  // a dot for each, where it came, as high as it took
  const least = Math.log10(3), most = Math.log10(Math.max(40, ...requests.map(request => 1.2 * request[3])));
  const y = ms => top + FIRST - (FIRST - 16) * Math.max(0, Math.log10(ms) - least) / (most - least);
  write(LEFT + 2, top + 6, "until the first token [ms]", "", "start");
  for (const ms of [3, 10, 30, 100, 300, 1000, 3000].filter(ms => Math.log10(ms) < most)) {
    draw("path", {d: `M${LEFT} ${y(ms)}H${x(page.run.frames.length)}`, class: "rule"});
    write(LEFT - 3, y(ms) + 4, ms, "", "end");
  }
  const dots = {};
  for (const [, number, t, ms] of requests) dots[number] = (dots[number] || "") + `M${x(t + .5)} ${y(ms)}h0`;
  for (const [number, d] of Object.entries(dots)) draw("path", {d, class: "dots", stroke: colour(tint(number))});
  for (const percent of [50, 99]) {
    let line = "";
    for (let t = 0; t < until; t++) {
      const window = requests.filter(request => request[2] <= t && request[2] > t - WINDOW).map(request => request[3]);
      if (window.length) line += `${line ? "L" : "M"}${x(t + .5)} ${y(percentile(window, percent))}`;
    }
    draw("path", {d: line || "M0 0", class: `percentile p${percent}`});
  }
}

function drawReplicas() {  // into the rows that are there: while the page plays, a button must stay to be clicked
  const {run, setup, tick} = page, rows = $("replicas");
  while (rows.children.length > run.setup.replicas) rows.lastChild.remove();
  while (rows.children.length < run.setup.replicas) {
    const button = element("button", {}, "kill");
    button.onclick = () => change(changed => {
      changed.deaths.push([10 * ++page.tick, Number(button.dataset.number)]);  // when the moment that is shown is over
    });
    rows.append(element("tr", {}, ...Array.from({length: 5}, () => element("td")), element("td", {}, button)));
  }
  [...rows.children].forEach((row, lane) => {
    const number = served(run.frames[tick], lane), [waits, runs, blocks] = run.frames[tick].replicas[number] || [];
    const mine = run.requests.filter(request => request[1] === Number(number) && request[2] <= tick);
    const sum = i => mine.reduce((n, request) => n + request[i], 0);
    const cached = sum(5) ? `${Math.round(100 * sum(4) / sum(5))}%` : "–";
    const cells = number === undefined ? ["nobody yet", "–", "–", "–", "–"]
      : [chip(tint(number), `replica ${number}`), `${waits}`, `${runs}`, `${blocks} of ${run.setup.num_blocks}`, cached];
    cells.forEach((cell, i) => row.cells[i].replaceChildren(cell));
    const button = row.querySelector("button");
    button.disabled = !page.python || !page.guessed || number === undefined;
    button.ariaLabel = `kill replica ${number}`;
    button.dataset.number = number;
  });
  if ($("deaths").dataset.drawn === JSON.stringify(setup.deaths)) return;
  $("deaths").dataset.drawn = JSON.stringify(setup.deaths);
  const revive = death => change(changed => { changed.deaths = changed.deaths.filter(other => other !== death); });
  $("deaths").replaceChildren(...setup.deaths.map(death => element("button", {title: "let it live",
    onclick: () => page.python && revive(death)}, `replica ${death[1]} dies at ${death[0] / 1000} s ×`)));
}

function drawDecisions() {  // those of this moment, and before them the latest ones
  const {run, tick} = page, shown = [];
  $("whose").textContent = "What the router decides";
  for (let t = tick; t >= 0 && shown.length < 7; t--) {
    for (const [kind, text] of [...run.frames[t].why].reverse()) {
      const node = element("li", {className: t === tick ? kind : `${kind} past`}, ...sentence(text));
      const went = /to replica (\d+)/.exec(text);
      if (went) node.style.setProperty("--replica", colour(tint(went[1])));
      shown.push(node);
    }
  }
  $("why").replaceChildren(...shown.slice(0, Math.max(7, run.frames[tick].why.length)));
  if (!shown.length) $("why").append(element("li", {}, "No request has come yet."));
}

function fleetTotals() {
  const {by_replica} = page.run.totals;
  const went = Object.entries(by_replica).flatMap(([number, n]) => [" ", chip(tint(number), number), ` ${n}`]);
  return [[figure("requests", n => count(n, "request")), figure("p50", ms => `first token p50 ${ms} ms`),
    figure("p99", ms => `p99 ${ms} ms`), figure("cached", share => `${share}% of the prompt tokens from caches`),
    figure("preemptions", n => count(n, "preemption")), figure("resent", n => `${n} sent again`)].join(" · ") +
    " · to replica:", ...went];
}

function routing() {  // the router, and its own option
  const names = Object.entries(ROUTERS).map(([value, words]) => element("option", {value}, `${value}: ${words}`));
  const select = element("select", {ariaLabel: "router"}, ...names), {setup} = page;
  select.value = setup.router;
  select.onchange = () => {
    change(changed => { changed.router = select.value; });
    drawKnobs();
    $("sliders").querySelector("select").focus();
  };
  const knobs = [element("label", {className: "switch"}, "router", select)];
  if (setup.router === "prefix") {
    const words = n => n ? `a lead of ${n} requests at most` : "no limit";
    const input = element("input", {type: "range", min: 0, max: 32, value: setup.threshold,
      ariaLabel: "imbalanced_threshold"});
    const output = element("output", {}, words(setup.threshold));
    input.oninput = () => change(changed => { output.textContent = words(changed.threshold = Number(input.value)); });
    knobs.push(element("label", {className: "switch"}, "imbalanced_threshold", input, output));
  }
  return knobs;
}

async function checkFleets() {  // after the first floor's scenes, so that nobody waits for it
  let same = true, sentences = 0;
  for (const {run, ...setup} of FLEETS) {
    same = same && JSON.stringify(await ask({do: "fleet", setup})) === JSON.stringify(run);
    sentences += run.frames.reduce((n, frame) => n + frame.why.length, 0);
  }
  $("python").textContent += same ? ` So do the fleets, decision by decision: ${sentences}.` : " The fleets DIFFER.";
}
