"use strict";
// Draws the figures in the colours of the page, and moves over their points with the keyboard.
(() => {
  const data_of = (page) => JSON.parse(page.getElementById("report-data").textContent);
  let { figures, fingerprint, ended, news } = data_of(document);
  const root = document.documentElement;
  const plots = () => [...document.querySelectorAll(".plot")];
  const message = document.getElementById("message");
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;

  const colour = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };

  const draw = (plot, given) => {
    const width = given || plot.clientWidth;
    if (!width) return;
    plot.hidden_series ||= new Set();
    const style = { colour, family: getComputedStyle(document.body).fontFamily, size: width < 520 ? 11 : 13 };
    plot.drawing = draw_chart(figures[plot.dataset.chart], width, style, plot.hidden_series);
    plot.drawing.svg.setAttribute("aria-hidden", "true"); // the table has the numbers
    plot.replaceChildren(plot.drawing.svg);
    plot.drawn_width = width;
  };
  const draw_all = (width = 0) => plots().forEach((plot) => draw(plot, width));
  const widened = () => plots().slice(0, 1).some((plot) => Math.abs(plot.clientWidth - plot.drawn_width) > 1);
  new ResizeObserver(() => { if (!printing && widened()) draw_all(); }).observe(document.body);

  // What is closed has no width, and is drawn when it is opened. A link opens what is around its target.
  document.addEventListener("toggle", (event) => { if (event.target.open) event.target.querySelectorAll(".plot").forEach((plot) => draw(plot)); }, true);
  const reveal = (id) => {
    for (let around = document.getElementById(id)?.closest("details"); around; around = around.parentElement.closest("details")) around.open = true;
  };
  addEventListener("hashchange", () => reveal(location.hash.slice(1)));
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.('a[href^="#"]');
    if (link) reveal(link.hash.slice(1));
  });

  // On paper: light colours, and letters that are legible at the width of a page.
  let printing = false, kept, closed;
  const details = () => document.getElementById("details");
  addEventListener("beforeprint", () => {
    [printing, kept] = [true, root.dataset.theme];
    root.dataset.theme = "light";
    closed = details()?.open === false;
    if (closed) details().open = true;
    draw_all(720);
  });
  addEventListener("afterprint", () => {
    printing = false;
    if (closed) details().open = false;
    if (kept) root.dataset.theme = kept;
    else delete root.dataset.theme;
    draw_all();
  });

  // Light and dark: as the system, until the button changes it.
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = (value) => {
    try { return value === undefined ? localStorage.getItem("copfl-theme") : localStorage.setItem("copfl-theme", value); }
    catch { return null; } // some browsers store nothing for pages from disk
  };
  const is_dark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const button = document.getElementById("theme");
  const apply_theme = (theme) => {
    if (theme) root.dataset.theme = theme;
    button.setAttribute("aria-pressed", String(is_dark()));
    button.setAttribute("aria-label", "Dark colours");
    draw_all();
  };
  button.addEventListener("click", () => {
    const theme = is_dark() ? "light" : "dark";
    stored(theme);
    apply_theme(theme);
  });
  system.addEventListener("change", () => apply_theme());

  // What is said of a point, or of all curves at its round.
  const show = (plot, point) => {
    plot.querySelector(".tip")?.remove();
    plot.querySelector(".here")?.remove();
    if (!point) return;
    const { svg, points, unified } = plot.drawing;
    const said = unified ? points.filter((other) => other.head === point.head && other.known) : [point];
    const tip = plot.appendChild(document.createElement("div"));
    tip.className = "tip";
    tip.append(Object.assign(document.createElement("b"), { textContent: point.head }));
    for (const { name, value, colour: shade, remark } of said) {
      const line = tip.appendChild(document.createElement("div"));
      if (shade) line.appendChild(document.createElement("i")).style.background = shade;
      line.append(`${name}: ${value}${remark ? `; ${remark}` : ""}`);
    }
    const here = document.createElementNS("http://www.w3.org/2000/svg", point.size ? "rect" : "circle");
    const [w, h] = point.size || [];
    const place = point.size ? { x: point.x - w / 2, y: point.y - h / 2, width: w, height: h } : { cx: point.x, cy: point.y, r: 8 };
    for (const [key, value] of Object.entries({ ...place, class: "here", fill: "none", stroke: colour("--ink"), "stroke-width": 2 })) here.setAttribute(key, value);
    svg.append(here);
    tip.style.left = `${Math.max(0, Math.min(point.x + 14, plot.clientWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(0, point.y - tip.offsetHeight - 12)}px`;
  };
  const nearest = (plot, event) => {
    const box = plot.drawing.svg.getBoundingClientRect(), size = box.width / plot.drawn_width;
    const [x, y] = [(event.clientX - box.left) / size, (event.clientY - box.top) / size];
    let found = null, least = plot.drawing.unified ? Infinity : 60;
    for (const point of plot.drawing.points) {
      if (!point.known) continue;
      const [dx, dy] = [Math.abs(point.x - x), Math.abs(point.y - y)];
      if (point.size && (dx > point.size[0] / 2 || dy > point.size[1] / 2)) continue;
      const far = plot.drawing.unified ? dx + dy / 1e4 : Math.hypot(dx, dy); // of curves, the round comes first
      if (far < least) [found, least] = [point, far];
    }
    return found;
  };

  // The keyboard: one pair of arrows moves along a series or row, the other across.
  const move = (plot, across, down) => {
    const { points } = plot.drawing;
    if (!points.length) return;
    const most = (key) => Math.max(...points.map((point) => point[key]));
    const at = plot.place;
    const to = at
      ? { row: Math.max(0, Math.min(most("row"), at.row + down)), column: Math.max(0, Math.min(most("column"), at.column + across)) }
      : { row: 0, column: 0 };
    const point = points.find(({ row, column }) => row === to.row && column === to.column);
    if (!point) return; // the end of a shorter curve
    plot.place = to;
    show(plot, point);
    message.textContent = `${point.head}, ${point.name}: ${point.value}${point.remark ? `, ${point.remark}` : ""}`;
  };
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const connect = (plot) => {
    plot.addEventListener("keydown", (event) => {
      if (event.key in moves && !event.altKey && !event.ctrlKey && !event.metaKey) {
        event.preventDefault();
        move(plot, ...moves[event.key]);
      } else if (event.key === "Escape") plot.blur();
    });
    plot.addEventListener("blur", () => show(plot));
    plot.addEventListener("pointermove", (event) => show(plot, nearest(plot, event)));
    plot.addEventListener("pointerleave", () => show(plot));
    plot.addEventListener("click", (event) => { // a name of the legend hides its series, or shows it again
      const entry = event.target.closest("[data-series]");
      if (!entry) return;
      const place = Number(entry.dataset.series), hidden = plot.hidden_series;
      if (!hidden.delete(place)) hidden.add(place);
      draw(plot);
    });
  };

  const download = (address, name) => Object.assign(document.createElement("a"), { href: address, download: name }).click();
  document.addEventListener("click", (event) => {
    const save = event.target.closest?.("[data-save]");
    if (!save) return;
    const { svg } = document.getElementById(`plot-${save.dataset.of}`).drawing;
    const copy = svg.cloneNode(true);
    copy.style.background = colour("--paper");
    const text = new XMLSerializer().serializeToString(copy);
    const address = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    if (save.dataset.save === "svg") return download(address, `${save.dataset.of}.svg`);
    const picture = new Image();
    picture.addEventListener("load", () => {
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [2 * picture.width, 2 * picture.height];
      const context = canvas.getContext("2d");
      context.fillStyle = colour("--paper");
      context.fillRect(0, 0, canvas.width, canvas.height);
      context.drawImage(picture, 0, 0, canvas.width, canvas.height);
      download(canvas.toDataURL("image/png"), `${save.dataset.of}.png`);
    });
    picture.src = address;
  });

  // While a run continues: request the updates, and change only what differs. An element that stays keeps its focus,
  // its scroll position, and whether it is open. Elements with an id are recognised by it; their order never changes.
  const is_alike = (one, other) => one && one.nodeName === other.nodeName && (one.id || "") === (other.id || "");
  const removed = (node) => {
    const next = node.nextSibling;
    node.remove();
    return next;
  };
  const update = (old, wanted) => {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.nodeValue !== wanted.nodeValue) old.nodeValue = wanted.nodeValue;
      return;
    }
    for (const { name } of [...old.attributes]) if (name !== "open" && !wanted.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of wanted.attributes) if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
    if (old.matches(".plot")) return; // drawn from the data
    let place = old.firstChild;
    for (const child of [...wanted.childNodes]) {
      const same = child.id ? [...old.children].find((other) => is_alike(other, child)) : place;
      while (child.id && same && place && place !== same) place = removed(place);
      if (is_alike(same, child)) {
        update(same, child);
        place = same.nextSibling;
      } else old.insertBefore(child, place);
    }
    while (place) place = removed(place);
  };
  const LIVE = ["part-title", "part-sections", "content"];
  const show_update = (page) => {
    ({ figures, fingerprint, ended, news } = data_of(page));
    const focused = document.activeElement, before = new Set(plots());
    document.title = page.title;
    for (const id of LIVE) update(document.getElementById(id), page.getElementById(id));
    plots().filter((plot) => !before.has(plot)).forEach(connect);
    draw_all();
    if (!focused.isConnected) document.getElementById("content").focus({ preventScroll: true });
    const at = focused.isConnected && focused.drawing && focused.place;
    if (at) show(focused, focused.drawing.points.find(({ row, column }) => row === at.row && column === at.column));
  };

  // A screen reader hears what is new, at most every half minute, and at once if no more will follow.
  const QUIET = 30000;
  let told = news, told_at = -Infinity;
  const tell = (text, at_once = false) => {
    if (!text || text === told || (!at_once && performance.now() < told_at + QUIET)) return;
    [told, told_at] = [text, performance.now()];
    document.getElementById("news").textContent = text;
  };
  const LOST = "No connection to copfl: the page shows the last numbers it received";
  const refresh = async () => {
    const connection = document.getElementById("connection");
    let wait = 2000;
    try {
      const answer = await fetch(`?have=${encodeURIComponent(fingerprint)}`, { cache: "no-store" });
      if (paused()) return;
      if (answer.status === 200) show_update(new DOMParser().parseFromString(await answer.text(), "text/html"));
      else if (answer.status !== 304) throw new Error(answer.status);
      tell(news, ended);
      connection.textContent = ended ? "" : "live";
      if (ended) return pause_button.remove();
    } catch {
      wait = 10000; // the server has stopped, or is busy
      connection.textContent = LOST;
      tell(LOST);
    }
    timer = setTimeout(refresh, wait);
  };
  let timer;
  const pause_button = document.getElementById("pause");
  const paused = () => pause_button.getAttribute("aria-pressed") === "true";
  pause_button?.addEventListener("click", () => {
    pause_button.setAttribute("aria-pressed", String(!paused()));
    clearTimeout(timer);
    if (paused()) document.getElementById("connection").textContent = "paused";
    else refresh();
  });

  plots().forEach(connect);
  apply_theme(stored() || undefined);
  reveal(location.hash.slice(1));
  root.dataset.drawn = "yes";
  if (fingerprint && !ended) refresh();
  else pause_button?.remove();
})();
