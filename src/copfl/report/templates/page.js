"use strict";
// Draws the figures in the colours of the page, and moves over their points with the keyboard.
(() => {
  const data_of = (page) => JSON.parse(page.getElementById("report-data").textContent);
  let { figures, fingerprint, ended } = data_of(document);
  const root = document.documentElement;
  const plots = [...document.querySelectorAll(".plot")];
  const message = document.getElementById("message");
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;

  const colour = (name) => {
    probe.style.color = name;
    return getComputedStyle(probe).color;
  };
  const translucent = (rgb) => rgb.replace("rgb(", "rgba(").replace(")", ", 0.16)");

  // The figure with its "var(--name)" colours replaced.
  const coloured = (value) => {
    if (typeof value === "string") return value.startsWith("var(--") ? colour(value) : value;
    if (Array.isArray(value)) return typeof value[0] === "object" && !Array.isArray(value[0]) ? value.map(coloured) : value;
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, coloured(part)]));
  };

  const axis = (given) => ({
    gridcolor: colour("var(--rule)"), zerolinecolor: colour("var(--faint)"), linecolor: colour("var(--rule)"), ...given,
  });

  const layout_of = (given, narrow) => ({
    ...given,
    xaxis: axis(given.xaxis),
    yaxis: axis(given.yaxis),
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("var(--ink)"), family: getComputedStyle(document.body).fontFamily, size: narrow ? 11 : 13 },
    hoverlabel: { bgcolor: colour("var(--raised)"), bordercolor: colour("var(--faint)"), font: { color: colour("var(--ink)") } },
    legend: { orientation: "h", traceorder: "normal", x: 0, y: 1.02, yanchor: "bottom" },
    margin: { l: narrow ? 48 : 64, r: 12, t: 28, b: 48 },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
    uirevision: "kept", // new data keep the zoom
  });

  const draw = (plot) => {
    const narrow = plot.clientWidth < 520;
    const figure = coloured(figures[plot.dataset.chart]);
    for (const trace of figure.data) {
      if (trace.meta === "band") trace.fillcolor = translucent(trace.fillcolor);
      if (trace.colorbar && narrow) trace.colorbar = { ...trace.colorbar, orientation: "h", y: 1.02, yanchor: "bottom", title: { text: trace.colorbar.title.text, side: "top" } };
    }
    return Plotly.react(plot, figure.data, layout_of(figure.layout, narrow), { responsive: true, displayModeBar: false });
  };
  const draw_all = () => Promise.all(plots.map(draw));

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
    return draw_all();
  };
  button.addEventListener("click", () => {
    const theme = is_dark() ? "light" : "dark";
    stored(theme);
    apply_theme(theme);
  });
  system.addEventListener("change", () => apply_theme());

  // The keyboard: one pair of arrows moves along a series or row, the other across.
  const seen = (plot) => plot.data.map((trace, number) => [trace, number]).filter(([t]) => t.hoverinfo !== "skip" && t.visible !== "legendonly");
  const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));
  const move = (plot, across, down) => {
    const at = plot.place || { row: 0, column: -1 };
    const traces = seen(plot);
    if (!traces.length) return;
    const heat = traces[0][0].type === "heatmap", dots = traces[0][0].mode === "markers";
    let sizes;
    if (heat) sizes = [traces[0][0].z.length, traces[0][0].x.length];
    else if (dots) sizes = [traces[0][0].y.length, traces.length];
    else sizes = [traces.length, traces[0][0].x.length];
    const first = at.column < 0;
    at.row = clamp(at.row + (first ? 0 : down), sizes[0]);
    at.column = first ? 0 : clamp(at.column + across, sizes[1]);
    plot.place = at;
    const [trace, curve] = heat ? traces[0] : traces[dots ? at.column : at.row];
    const point = dots ? at.row : at.column;
    if (heat) Plotly.Fx.hover(plot, [{ curveNumber: curve, pointNumber: [at.row, at.column] }]);
    else Plotly.Fx.hover(plot, [{ curveNumber: curve, pointNumber: point }]);
    const number = (value) => (value === null || value === undefined ? "no value" : Number(value.toPrecision(4)).toString());
    const remark = trace.customdata && trace.customdata[point] ? ", " + trace.customdata[point] : "";
    if (heat) message.textContent = `${trace.y[at.row]}, ${plot.layout.xaxis.title.text} ${trace.x[at.column]}: ${number(trace.z[at.row][at.column])}`;
    else if (dots) message.textContent = `${trace.y[point]}, ${trace.name}: ${number(trace.x[point])}`;
    else message.textContent = `${plot.layout.xaxis.title.text} ${trace.x[point]}, ${trace.name}: ${number(trace.y[point])}${remark}`;
  };
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  for (const plot of plots) {
    plot.addEventListener("keydown", (event) => {
      if (event.key in moves && !event.altKey && !event.ctrlKey && !event.metaKey) {
        event.preventDefault();
        move(plot, ...moves[event.key]);
      } else if (event.key === "Escape") {
        Plotly.Fx.unhover(plot);
        plot.blur();
      }
    });
    plot.addEventListener("blur", () => Plotly.Fx.unhover(plot));
  }

  for (const save of document.querySelectorAll("[data-save]")) {
    save.addEventListener("click", () => {
      const plot = document.getElementById(`plot-${save.dataset.of}`);
      Plotly.downloadImage(plot, { format: save.dataset.save, filename: save.dataset.of, width: 900, height: plot.layout.height, scale: 2 });
    });
  }

  // While a run continues: request the updates, and replace only what changed.
  const refresh = async () => {
    let wait = 2000;
    try {
      const answer = await fetch(`?have=${encodeURIComponent(fingerprint)}`, { cache: "no-store" });
      if (answer.status === 200) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const update = data_of(page);
        if (Object.keys(update.figures).join() !== Object.keys(figures).join()) return location.reload();
        ({ figures, fingerprint, ended } = update);
        for (const part of document.querySelectorAll("[id^=part-]")) {
          const html = page.getElementById(part.id)?.innerHTML;
          if (html === undefined || part.innerHTML === html) continue;
          const { scrollTop = 0, scrollLeft = 0 } = part.querySelector(".scroll") || {};
          part.innerHTML = html;
          if (part.querySelector(".scroll")) Object.assign(part.querySelector(".scroll"), { scrollTop, scrollLeft });
        }
        await draw_all();
        if (ended) return;
      }
    } catch {
      wait = 10000; // the server has stopped, or is busy
    }
    setTimeout(refresh, wait);
  };

  apply_theme(stored() || undefined).then(() => {
    root.dataset.drawn = "yes";
    if (fingerprint && !ended) refresh();
  });
})();
