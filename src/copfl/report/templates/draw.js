"use strict";
// Draws a chart of copfl.charts as SVG. A drawing is its svg element and its points: where each is, its place in the
// grid that the arrow keys walk over, and what is said of it.
const draw_chart = (() => {
  const DASHES = ["", "7 4", "2 3", "8 3 2 3"];
  const LEGEND = 20, TICK = 5, SWATCH = 22;

  const node = (name, attributes = {}, ...inside) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, typeof value === "number" ? +value.toFixed(2) : value);
    made.append(...inside);
    return made;
  };
  const canvas = document.createElement("canvas").getContext("2d");
  const width_of = (text, font) => { canvas.font = font; return canvas.measureText(text).width; };
  const shortened = (text, room, font) => {
    if (width_of(text, font) <= room) return text;
    let length = text.length;
    while (length > 1 && width_of(text.slice(0, length) + "…", font) > room) length -= 1;
    return text.slice(0, length) + "…";
  };
  const known = (values) => values.filter((value) => value !== null && value !== undefined);
  const scale = (from, to, start, end) => (value) => start + ((value - from) / (to - from || 1)) * (end - start);
  const written = (value, digits) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const shown = (value, figure) => (value === null || value === undefined ? "no value" : written(value, figure.digits) + figure.unit);

  // Round numbers from low to high; whole ones where all values are whole.
  const ticks_of = (low, high, count, whole) => {
    const rough = (high - low || 1) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough) + 1e-9);
    let step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * (1 - 1e-9));
    if (whole) step = Math.max(1, step);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)), ticks = [];
    for (let place = Math.ceil(low / step - 1e-9); place * step <= high + 1e-9 * step; place += 1) ticks.push(place * step || 0); // no -0
    return ticks.map((value) => [value, written(value, digits)]);
  };
  const whole = (values) => values.every(Number.isInteger);

  // Symbols of the series of dots, in their order; open ones, so that overlapping dots are visible.
  const star = (r) => [0, 1, 2].map((n) => `M${-r * Math.cos(n * Math.PI / 3)} ${-r * Math.sin(n * Math.PI / 3)}L${r * Math.cos(n * Math.PI / 3)} ${r * Math.sin(n * Math.PI / 3)}`).join("");
  const SYMBOLS = [
    "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z", "M0 -6.5L6.5 0L0 6.5L-6.5 0Z", "M-5 -5L5 5M-5 5L5 -5", "M-5 -5H5V5H-5Z",
    "M0 -6L6 5H-6Z", "M-6 0H6M0 -6V6", star(6), "M0 6L6 -5H-6Z",
  ];
  const symbol = (place, x, y, colour) => node("path", {
    d: SYMBOLS[place % SYMBOLS.length], transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, class: "point",
    fill: place ? "none" : colour, stroke: colour, "stroke-width": 2,
  });

  const drawing = (figure, width, style, hidden) => {
    const font = `${style.size}px ${style.family}`;
    const svg = node("svg", { "font-family": style.family, "font-size": style.size, fill: style.colour("--ink") });
    const text = (content, x, y, more = {}) => svg.appendChild(node("text", { x, y, ...more }, content));
    const rule = (x1, y1, x2, y2, colour = "--rule", more = {}) =>
      svg.appendChild(node("line", { x1, y1, x2, y2, stroke: style.colour(colour), ...more }));
    const series_colour = (line) => style.colour(`--c${line.colour % 8}`);

    // The legend, wrapped to the width; returns the height that it takes.
    const legend = (series, mark) => {
      let x = 0, row = 0;
      series.forEach((line, place) => {
        const name = shortened(line.name, width - SWATCH - 12, font), size = SWATCH + width_of(name, font) + 18;
        if (x && x + size > width) { x = 0; row += 1; }
        const y = row * LEGEND + LEGEND / 2, group = node("g", { class: "entry", "data-series": place, opacity: hidden.has(place) ? 0.35 : 1 });
        group.append(node("rect", { x, y: y - LEGEND / 2, width: size - 8, height: LEGEND, fill: "transparent" }), mark(line, place, x + 8, y), node("text", { x: x + SWATCH, y: y + 4 }, name));
        svg.append(group);
        x += size;
      });
      return (row + 1) * LEGEND + 8;
    };
    const finished = (height, points, unified = false) => {
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("width", width);
      svg.setAttribute("height", height);
      return { svg, points, unified };
    };
    const bottom_axis = (ticks, x, top, bottom, title, left) => {
      for (const [value, label] of ticks) {
        rule(x(value), top, x(value), bottom + TICK);
        text(label, x(value), bottom + TICK + style.size, { "text-anchor": "middle" });
      }
      text(title, (left + width) / 2, bottom + 2.6 * style.size + TICK, { "text-anchor": "middle" });
    };

    const lines = () => {
      const stroke = (line) => ({ stroke: series_colour(line), "stroke-width": 2, "stroke-dasharray": DASHES[line.dash % 4], fill: "none" });
      const top = legend(figure.lines, (line, place, x, y) => node("path", { d: `M${x - 8} ${y}H${x + 8}`, ...stroke(line) }));
      const height = top + 330, bottom = height - 3.2 * style.size;
      const seen = figure.lines.map((line, place) => ({ ...line, place, x: line.x.length ? line.x : figure.x })).filter((line) => !hidden.has(line.place));
      const values = known(seen.flatMap((line) => [...line.y, ...line.low, ...line.high]));
      let low = Math.min(...values, Infinity), high = Math.max(...values, -Infinity);
      if (!values.length) [low, high] = [0, 1];
      if (low > 0 && low < high / 2) low = 0;
      const room = (high - low || Math.abs(high) || 1) * 0.04;
      if (low !== 0) low -= room;
      high += room;
      const y_ticks = ticks_of(low, high, 6, values.length > 0 && whole(values));
      const left = 2.4 * style.size + Math.max(...y_ticks.map(([, label]) => width_of(label, font)));
      const rounds = seen.flatMap((line) => line.x.slice(0, line.y.length));
      const [first, last] = rounds.length ? [Math.min(...rounds), Math.max(...rounds)] : [0, 1];
      const x = scale(first, last, left + 8, width - 12), y = scale(low, high, bottom, top + 4);
      bottom_axis(ticks_of(first, last, width / 90, whole(rounds)), x, top, bottom, figure.x_title, left);
      for (const [value, label] of y_ticks) {
        rule(left, y(value), width, y(value));
        text(label, left - 6, y(value) + 4, { "text-anchor": "end" });
      }
      text(figure.y_title, 0, 0, { transform: `translate(${style.size} ${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" });
      const points = [];
      // Several bands would mix their colours, so each is then drawn as bars at some of the rounds.
      const bands = seen.filter((line) => line.low.length);
      bands.forEach((line, order) => {
        const places = [...line.low.keys()].filter((place) => line.low[place] !== null && line.high[place] !== null);
        const at = (place, value) => `${x(line.x[place]).toFixed(1)} ${y(value[place]).toFixed(1)}`;
        if (bands.length === 1) {
          const path = [...places.map((place) => at(place, line.high)), ...places.reverse().map((place) => at(place, line.low))];
          if (path.length) svg.append(node("path", { d: `M${path.join("L")}Z`, fill: series_colour(line), opacity: 0.16, class: "band" }));
          return;
        }
        const every = Math.max(1, Math.ceil(places.length / 8)), shift = 5 * (order - (bands.length - 1) / 2);
        for (const place of places.filter((_, n) => (n + 1) % every === 0 || places.length === 1)) {
          const [cx, ends] = [x(line.x[place]) + shift, [line.low, line.high].map((end) => y(end[place]))];
          svg.append(node("path", { d: `M${cx} ${ends[0]}V${ends[1]}M${cx - 3} ${ends[0]}h6M${cx - 3} ${ends[1]}h6`, stroke: series_colour(line), "stroke-width": 1.3, class: "bar" }));
        }
      });
      seen.forEach((line, row) => {
        const places = [...line.y.keys()].filter((place) => line.y[place] !== null);
        const at = places.map((place) => `${x(line.x[place]).toFixed(1)} ${y(line.y[place]).toFixed(1)}`);
        if (at.length > 1) svg.append(node("path", { d: `M${at.join("L")}`, ...stroke(line), class: "curve" }));
        else for (const place of places) svg.append(symbol(0, x(line.x[place]), y(line.y[place]), series_colour(line)));
        line.y.forEach((value, column) => points.push({
          row, column, x: x(line.x[column]), y: value === null ? bottom : y(value), known: value !== null, colour: series_colour(line),
          head: `${figure.x_title} ${line.x[column]}`, name: line.name, value: shown(value, figure), remark: line.remarks[column] || "",
        }));
      });
      return finished(height, points, true);
    };

    // The names at the left, some of them where there is no room for all; returns where the chart begins.
    const row_names = (top, bottom) => {
      const longest = Math.max(...figure.rows.map((name) => width_of(name, font)), 0);
      const left = Math.min(longest, width * 0.38) + 10, step = (bottom - top) / figure.rows.length;
      const every = Math.ceil((style.size + 2) / step);
      figure.rows.forEach((name, row) => {
        if (row % every === 0) text(shortened(name, left - 8, font), left - 8, top + (row + 0.5) * step + 4, { "text-anchor": "end" });
      });
      return [left, step];
    };
    const tall = (top) => Math.min(900, top + 60 + Math.max(14, Math.min(24, 700 / figure.rows.length)) * figure.rows.length);

    const dots = () => {
      const top = legend(figure.series, (line, place, x, y) => symbol(line.symbol ?? place, x, y, series_colour(line)));
      const height = tall(top), bottom = height - 3.2 * style.size;
      const [left, step] = row_names(top, bottom);
      const seen = figure.series.map((line, place) => ({ ...line, place })).filter((line) => !hidden.has(line.place));
      const values = known(seen.flatMap((line) => [...line.y, ...line.low, ...line.high]));
      let [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
      if (figure.zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
      const room = (high - low || Math.abs(high) || 1) * 0.04, x = scale(low - room, high + room, left + 8, width - 12);
      bottom_axis(ticks_of(low - room, high + room, width / 80, values.length > 0 && whole(values)), x, top, bottom, figure.x_title, left);
      figure.rows.forEach((_, row) => rule(left, top + (row + 0.5) * step, width, top + (row + 0.5) * step, "--rule", { opacity: 0.5 }));
      if (figure.zero) rule(x(0), top, x(0), bottom, "--faint", { "stroke-width": 2 });
      // Marks at one place would hide each other, so they are moved apart, up and down.
      const apart = (row, column) => {
        const near = seen.map((line, n) => n).filter((n) => known([seen[n].y[row], seen[column].y[row]]).length === 2 && Math.abs(x(seen[n].y[row]) - x(seen[column].y[row])) < 8);
        return near.length < 2 ? 0 : (near.indexOf(column) - (near.length - 1) / 2) * Math.min(8, 0.7 * step / near.length);
      };
      const points = [];
      seen.forEach((line, column) => figure.rows.forEach((name, row) => {
        const value = line.y[row], y = top + (row + 0.5) * step + apart(row, column), colour = series_colour(line);
        const found = value !== null && value !== undefined, ranged = found && line.low.length && line.low[row] !== null;
        if (ranged) svg.append(node("path", { d: `M${x(line.low[row])} ${y}H${x(line.high[row])}M${x(line.low[row])} ${y - 4}v8M${x(line.high[row])} ${y - 4}v8`, stroke: colour, "stroke-width": 1.5, class: "bar" }));
        if (found) svg.append(symbol(line.symbol ?? line.place, x(value), y, colour));
        points.push({ row, column, x: found ? x(value) : left, y, known: found, colour, head: name, name: line.name, value: shown(value, figure), remark: line.remarks[row] || "" });
      }));
      return finished(height, points);
    };

    const heat = () => {
      const values = known(figure.values.flat()), centre = figure.centre;
      let [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
      if (figure.zero) low = 0;
      if (centre !== null) { const reach = Math.max(high - centre, centre - low) || 1; [low, high] = [centre - reach, centre + reach]; }
      const stops = (centre === null ? ["--heat0", "--heat1", "--heat2"] : ["--under", "--equal", "--over"]).map((name) => style.colour(name).match(/\d+/g).map(Number));
      if (figure.low_is_bright) stops.reverse();
      const colour = (value) => {
        const at = Math.max(0, 2 * (high > low ? (value - low) / (high - low) : 1)), from = Math.min(1, Math.floor(at));
        return `rgb(${stops[from].map((part, n) => Math.round(part + (stops[from + 1][n] - part) * (at - from))).join(",")})`;
      };
      // The bar of colours, above the chart.
      const label = `${figure.what}${figure.unit ? "," + figure.unit : ""}`, start = Math.min(width_of(label, font) + 14, width * 0.4), bar = Math.min(260, width - start - 40);
      const over_bar = scale(low, high, start, start + bar), [least, most] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
      text(label, 0, 13);
      const shades = Math.round(over_bar(most)) - Math.round(over_bar(Math.max(low, figure.zero ? 0 : least)));
      for (let n = 0; n <= shades; n += 2) {
        const at = Math.round(over_bar(Math.max(low, figure.zero ? 0 : least))) + n;
        svg.append(node("rect", { x: at, y: 2, width: 2.5, height: 12, fill: colour(low + ((at - start) / bar) * (high - low)) }));
      }
      const ends = [figure.zero ? 0 : least, most].filter((end, n, all) => !n || end !== all[0]);
      if (values.length) ends.forEach((end) => text(written(end, figure.digits), over_bar(end), 14 + style.size, { "text-anchor": "middle" }));
      if (centre !== null) {
        svg.append(node("path", { d: `M${over_bar(centre)} 0V17`, stroke: style.colour("--ink"), "stroke-width": 2, class: "centre" }));
        text(figure.centre_title, 0, 32 + style.size);
      }
      const top = centre === null ? 40 : 56;
      const names = figure.columns, longest = Math.max(...names.map((name) => width_of(name, font)), 0);
      const numbers = names.every((name) => /^\d+$/.test(name));
      const turned = !numbers && longest > 0.62 * width / names.length - 4; // the names of the columns
      const under = turned ? Math.min(longest, 110) * 0.72 + style.size : style.size;
      const height = tall(top) + under - style.size, bottom = height - 2 * style.size - under - TICK;
      const [left, step] = row_names(top, bottom), cell = (width - left - 2) / names.length, gap = cell > 4 && step > 4 ? 1 : 0;
      const points = [];
      figure.values.forEach((row_values, row) => row_values.forEach((value, column) => {
        const x = left + column * cell, y = top + row * step;
        if (value === null) rule(x + 0.35 * cell, y + 0.65 * step, x + 0.65 * cell, y + 0.35 * step, "--faint", { class: "cell none" });
        else svg.append(node("rect", { x, y, width: cell - gap, height: step - gap, fill: colour(value), class: "cell" }));
        points.push({ row, column, x: x + cell / 2, y: y + step / 2, size: [cell, step], known: true, head: figure.rows[row], name: `${figure.x_title} ${names[column]}`, value: shown(value, figure), remark: "" });
      }));
      const every = Math.ceil((turned ? style.size : longest + 8) / cell);
      names.forEach((name, column) => {
        const x = left + (column + 0.5) * cell;
        if (column % every) return;
        if (!turned) text(name, x, bottom + TICK + style.size, { "text-anchor": "middle" });
        else text(shortened(name, 110, font), 0, 0, { transform: `translate(${x + 3} ${bottom + TICK + 6}) rotate(-45)`, "text-anchor": "end" });
      });
      text(figure.x_title, (left + width) / 2, height - 4, { "text-anchor": "middle" });
      return finished(height, points);
    };

    const tree = () => {
      const step = 76, box = 2 * style.size + 14, deepest = Math.max(...figure.levels, 0), height = (deepest + 1) * step;
      const x = (place) => 4 + figure.places[place] * (width - 8), y = (place) => figure.levels[place] * step + box / 2 + 2;
      figure.parents.forEach((parent, place) => { if (parent >= 0) rule(x(parent), y(parent), x(place), y(place), "--faint"); });
      const points = [];
      figure.labels.forEach((label, place) => {
        const room = Math.min(190, (width - 8) / Math.max(1, 2 ** figure.levels[place]) - 4), cut = shortened(label, room - 8, font);
        const size = Math.max(12, Math.min(room, width_of(cut, font) + 14));
        svg.append(node("rect", { x: x(place) - size / 2, y: y(place) - box / 2, width: size, height: box, rx: 6, fill: style.colour("--paper"), stroke: style.colour("--c0"), class: "cell" }));
        text(cut, x(place), y(place) + 4, { "text-anchor": "middle" });
        points.push({ row: figure.levels[place], column: place, x: x(place), y: y(place), size: [size, box], known: true, head: `level ${figure.levels[place] + 1}`, name: label, value: "", remark: "" });
      });
      return finished(height, points);
    };
    // Does it pay? Names at the left and words at the right; on a narrow screen both above the bar.
    const gainchart = () => {
      const narrow = width < 560, step = narrow ? 3.6 * style.size : 2.5 * style.size, top = 2 * style.size + 6;
      const bold = `bold ${font}`, number = (row) => (row.gain === null ? "" : (row.gain < 0 ? "−" : "+") + written(Math.abs(row.gain), figure.digits));
      const said = (row) => [row.mark, row.words].filter(Boolean).join(" ");
      const longest = (texts, how) => Math.max(...texts.map((words) => width_of(words, how)), 0);
      const left = narrow ? 0 : Math.min(longest(figure.rows.map((row) => row.label), bold), 0.3 * width) + 12;
      const numbers = longest(figure.rows.map(number), bold), right = narrow ? width : width - longest(figure.rows.map(said), bold) - numbers - 24;
      const ends = known(figure.rows.flatMap((row) => [row.gain, row.low, row.high])), [low, high] = [Math.min(...ends, 0), Math.max(...ends, 0)];
      const room = (high - low || 1) * 0.06, x = scale(low - room, high + room, left, right);
      const fold = figure.folded ? Math.floor((figure.rows.length - (figure.mean ? 1 : 0)) / 2) : Infinity;
      const place = (row) => top + (row + (row >= fold ? 0.7 : 0)) * step, bottom = place(figure.rows.length) + 6;
      const side = (from, to, shade) => svg.append(node("rect", { x: from, y: top, width: Math.max(0, to - from), height: bottom - top, fill: style.colour(shade), class: "side" }));
      side(x(low - room), x(0), "--alone");
      side(x(0), x(high + room), "--together");
      text(`◀ ${figure.left}`, left, style.size + 2, { fill: style.colour("--alone-ink") });
      text(`${figure.right} ▶`, right, style.size + 2, { fill: style.colour("--together-ink"), "text-anchor": "end" });
      rule(x(0), top, x(0), bottom, "--ink", { "stroke-width": 1.5, class: "zero" });
      for (const [value, label] of ticks_of(low - room, high + room, (right - left) / 80)) {
        rule(x(value), bottom, x(value), bottom + TICK, "--faint");
        const half = width_of(label, font) / 2;
        text(label, Math.max(half, Math.min(width - half, x(value))), bottom + TICK + style.size, { "text-anchor": "middle" });
      }
      const axis = [""];
      for (const word of figure.x_title.split(" ")) {
        const longer = `${axis[axis.length - 1]} ${word}`.trim();
        if (width_of(longer, font) > width - 8) axis.push(word);
        else axis[axis.length - 1] = longer;
      }
      const widest = longest(axis, font) / 2, middle = Math.max(widest, Math.min(width - widest, (left + right) / 2));
      axis.forEach((words, n) => text(words, middle, bottom + TICK + (2.5 + 1.3 * n) * style.size, { "text-anchor": "middle" }));
      if (figure.folded) text(`… ${figure.folded} more between …`, (left + right) / 2, place(fold - 1) + step + 0.5 * style.size, { "text-anchor": "middle", fill: style.colour("--faint") });
      const points = figure.rows.map((row, order) => {
        const is_mean = figure.mean && order === figure.rows.length - 1, y = place(order) + (narrow ? 0.68 : 0.5) * step;
        const colour = style.colour(is_mean ? "--ink" : "--c0"), weight = is_mean ? { "font-weight": "bold" } : {};
        if (narrow) {
          const words = `${number(row)} ${said(row)}`;
          const size = width_of(words, is_mean ? bold : font) + 8;
          text(shortened(row.label, width - size - 12, is_mean ? bold : font), 6, place(order) + 1.4 * style.size, { ...weight, "paint-order": "stroke", stroke: style.colour("--paper"), "stroke-width": 3, "stroke-linejoin": "round" });
          text(words, width - 6, place(order) + 1.4 * style.size, { ...weight, "text-anchor": "end" });
        } else {
          text(shortened(row.label, left - 12, is_mean ? bold : font), left - 10, y + 4, { ...weight, "text-anchor": "end" });
          text(number(row), right + 12 + numbers, y + 4, { ...weight, "text-anchor": "end" });
          text(said(row), right + numbers + 22, y + 4, weight);
        }
        if (row.low !== null && row.high !== null) svg.append(node("path", { d: `M${x(row.low).toFixed(1)} ${y.toFixed(1)}H${x(row.high).toFixed(1)}`, stroke: colour, "stroke-width": is_mean ? 4 : 3, "stroke-linecap": "round", class: "bar" }));
        const found = row.gain !== null, at = found ? x(row.gain) : x(0);
        if (found) svg.append(node("path", { d: SYMBOLS[is_mean ? 1 : 0], transform: `translate(${at.toFixed(1)} ${y.toFixed(1)}) scale(1.25)`, fill: colour, class: "point" }));
        const ranged = row.low !== null ? `${written(row.low, figure.digits)} to ${written(row.high, figure.digits)}` : "no interval";
        return { row: order, column: 0, x: at, y, known: found, colour, head: row.label, name: "gain", value: `${shown(row.gain, figure)} (${ranged})`, remark: row.words };
      });
      return finished(bottom + TICK + (2.9 + 1.3 * (axis.length - 1)) * style.size, points);
    };
    return { lines, dots, heat, tree, gainchart }[figure.kind]();
  };
  return drawing;
})();
