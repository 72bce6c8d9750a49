import type { Actions, Dispose, PlotRequest, Point } from '../model';
import { duration, figure, nameRanks, Series, t, ticks, wholeDuration } from '../model';
import { Disposables, element, FrameTask, observeSize, setAttribute, setCutText, setText } from './dom';
import { Theme } from './theme';

const LEFT = 56;
const RIGHT = 34;
const TOP = 10;
const BOTTOM = 22;
/** Between two labels of the axis of times (seconds). */
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 43_200, 86_400];
/** With more lines than this, lines have one colour, and only outliers have their own. */
const COLOURED = 8;

interface Scale {
  readonly width: number;
  readonly height: number;
  readonly from: number;
  readonly to: number;
  readonly low: number;
  readonly high: number;
}

/**
 * A number over ranks and time. Up to 64 ranks each have a line; of more the chart shows the range and the median, and
 * the ranks that are far from it by name.
 */
export class LineChart {
  readonly node = element('div', 'mk-Chart');
  readonly series = new Series();
  private readonly _title = element('div', 'mk-Chart-title');
  private readonly _news = element('div', 'mk-Chart-news', { role: 'status' });
  private readonly _said = element('div', 'mk-Chart-said', { role: 'status' });
  private readonly _area = element('div', 'mk-Chart-area', { tabindex: 0, role: 'img' });
  private readonly _canvas = element('canvas', 'mk-Chart-canvas');
  private readonly _readout = element('div', 'mk-Chart-readout');
  private readonly _context: CanvasRenderingContext2D | null;
  private readonly _disposables = new Disposables();
  private readonly _frame = new FrameTask(() => this._draw());
  private readonly _theme: Theme;
  private _width = 0;
  private _height = 0;
  /** Where the crosshair is, as the index of a time (-1: nowhere), and the height of the pointer. */
  private _cross = -1;
  private _pointer = -1;
  /** Whether nothing follows, so that the last values are not those of now. */
  private _isOver = false;

  /**
   * @param actions - with `plot`, asks the kernel for the values; without them, `push` brings them.
   */
  constructor(host: HTMLElement, title: string, actions?: Actions, plot?: PlotRequest) {
    this.node.classList.add('mk-View');
    setText(this._title, title);
    this._context = this._canvas.getContext('2d');
    this._area.append(this._canvas);
    this.node.append(this._title, this._news, this._area, this._readout, this._said);
    host.append(this.node);
    this._theme = new Theme(this.node, () => this._frame.request());
    this._disposables.listen(this._area, 'pointermove', (event: PointerEvent) => this._moved(event));
    this._disposables.listen(this._area, 'pointerleave', () => this._setCross(-1));
    this._disposables.listen(this._area, 'keydown', (event: KeyboardEvent) => this._keyed(event));
    this._disposables.listen(this._area, 'blur', () => this._setCross(-1));
    this._disposables.add(observeSize(this._area, () => this._frame.request()));
    if (actions && plot) {
      this._follow(actions, plot);
    }
    this.update();
  }

  /** Add the values of all ranks at one time (seconds since 1970). */
  push(time: number, points: readonly Point[]): void {
    this.series.push(time, points);
    this.update();
  }

  /** Dim it: the kernel has gone, and the values are the last ones. */
  setGone(gone: boolean): void {
    setAttribute(this.node, 'data-gone', gone);
    this._setOver(gone);
    this._say(gone ? t('The kernel has gone. These are the last values.') : '');
  }

  update(): void {
    const outliers = this.series.outliers();
    const named = outliers.map(({ rank, value }) =>
      value === null ? t('rank %1: no finite number', rank) : t('rank %1: %2', rank, figure(value))
    );
    const last = this.series.spreads.at(-1);
    const middle = last && Number.isFinite(last.middle) ? t('median %1', figure(last.middle)) : '';
    setText(this._news, named.length ? named.join(' · ') : middle);
    setAttribute(this._news, 'data-bad', named.length > 0);
    const ranks = this.series.ranks;
    setAttribute(
      this._area,
      'aria-label',
      [this._title.textContent, ranks.length ? nameRanks(ranks) : t('no values yet'), middle, ...named].join(', ')
    );
    this._frame.request();
  }

  dispose(): void {
    this._frame.cancel();
    this._disposables.dispose();
    this._theme.dispose();
    this.node.remove();
  }

  private _follow(actions: Actions, plot: PlotRequest): void {
    const end: Dispose = actions.plot(
      plot,
      ({ time, values, error, ended }) => {
        if (values.length) {
          this.push(time, values);
        }
        if (error !== undefined || ended) {
          this._say(error || (ended ? t('The plot has ended.') : ''));
        }
        this._setOver(ended ?? false);
      },
      error => this._say([error.message, error.hint].filter(Boolean).join(' '))
    );
    this._disposables.add(end);
  }

  private _setOver(isOver: boolean): void {
    this._isOver = isOver;
    this._frame.request();
  }

  /** What there is to say beside the values. */
  private _say(text: string): void {
    setCutText(this._said, text);
  }

  private _moved(event: PointerEvent): void {
    const box = this._area.getBoundingClientRect();
    this._pointer = event.clientY - box.top;
    const { times } = this.series;
    const scale = this._scale();
    const time =
      scale.from + ((event.clientX - box.left - LEFT) / (scale.width - LEFT - RIGHT)) * (scale.to - scale.from);
    let nearest = -1;
    times.forEach((each, index) => {
      if (nearest < 0 || Math.abs(each - time) < Math.abs((times[nearest] ?? 0) - time)) {
        nearest = index;
      }
    });
    this._setCross(nearest);
  }

  private _keyed(event: KeyboardEvent): void {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step && this.series.times.length) {
      event.preventDefault();
      this._pointer = -1;
      const at = this._cross < 0 ? this.series.times.length - 1 : this._cross + step;
      this._setCross(Math.min(this.series.times.length - 1, Math.max(0, at)));
    }
  }

  private _setCross(index: number): void {
    this._cross = index;
    this._frame.request();
  }

  private _scale(): Scale {
    const { times, spreads } = this.series;
    let low = Infinity;
    let high = -Infinity;
    for (const spread of spreads) {
      low = spread.low < low ? spread.low : low;
      high = spread.high > high ? spread.high : high;
    }
    if (low > high) {
      [low, high] = [0, 1];
    }
    // Whole steps of the axis, so that it moves seldom; a constant has some room around it.
    const around = low === high ? Math.abs(low) * 0.1 || 1 : 0;
    const marks = ticks(low - around, high + around, 4);
    const step = (marks[1] ?? 1) - (marks[0] ?? 0) || 1;
    // The last values are at the right, where the axis says so; a young plot grows from there.
    const to = times.at(-1) ?? 0;
    return {
      width: this._width,
      height: this._height,
      from: Math.min(times[0] ?? 0, to - 10),
      to,
      low: Math.floor((low - around) / step + 1e-9) * step,
      high: Math.ceil((high + around) / step - 1e-9) * step
    };
  }

  private _draw(): void {
    const context = this._context;
    this._width = this._area.clientWidth;
    this._height = this._area.clientHeight;
    if (!context || !this._width) {
      return;
    }
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(this._width * ratio), Math.round(this._height * ratio)];
    if (this._canvas.width !== width || this._canvas.height !== height) {
      this._canvas.width = width;
      this._canvas.height = height;
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this._width, this._height);
    const scale = this._scale();
    const x = (time: number) => LEFT + ((time - scale.from) / (scale.to - scale.from)) * (scale.width - LEFT - RIGHT);
    const y = (value: number) =>
      TOP + (1 - (value - scale.low) / (scale.high - scale.low)) * (scale.height - TOP - BOTTOM);
    this._drawAxes(context, scale, x, y);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP - 2, scale.width - LEFT - RIGHT + 2, scale.height - TOP - BOTTOM + 4);
    context.clip();
    this._drawLines(context, x, y);
    context.restore();
    this._drawNames(context, y);
    this._drawCross(context, scale, x, y);
  }

  private _drawAxes(
    context: CanvasRenderingContext2D,
    scale: Scale,
    x: (time: number) => number,
    y: (value: number) => number
  ): void {
    const { line, faint, font } = this._theme.palette;
    context.font = `11px ${font}`;
    context.lineWidth = 1;
    context.strokeStyle = line;
    context.fillStyle = faint;
    context.textAlign = 'right';
    context.textBaseline = 'middle';
    for (const value of ticks(scale.low, scale.high, 4)) {
      const at = Math.round(y(value)) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, at);
      context.lineTo(scale.width - RIGHT, at);
      context.stroke();
      context.fillText(figure(value), LEFT - 6, at);
    }
    context.textBaseline = 'alphabetic';
    const span = scale.to - scale.from;
    const step = TIME_STEPS.find(each => (each / span) * (scale.width - LEFT - RIGHT) >= 90) ?? span;
    for (let back = 0; back <= span; back += step) {
      const at = x(scale.to - back);
      context.textAlign = back === 0 ? 'right' : at < LEFT + 24 ? 'left' : 'center';
      context.fillText(
        back > 0 ? `−${timeSpan(back)}` : this._isOver ? t('end') : t('now'),
        back === 0 ? at + RIGHT - 4 : at,
        scale.height - 6
      );
    }
  }

  private _drawLines(
    context: CanvasRenderingContext2D,
    x: (time: number) => number,
    y: (value: number) => number
  ): void {
    const { series } = this;
    const { lines, faint, states } = this._theme.palette;
    const outliers = new Set(series.outliers().map(({ rank }) => rank));
    // Outliers first: where they run with the others, these are seen.
    const hovered = this._cross >= 0 && this._pointer >= 0 ? this._nearest(y) : -1;
    const stroke = (values: (index: number) => number, colour: string, width: number, alpha: number) => {
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.globalAlpha = alpha;
      context.beginPath();
      let open = false;
      series.times.forEach((time, index) => {
        const value = values(index);
        if (Number.isFinite(value)) {
          if (open) {
            context.lineTo(x(time), y(value));
          } else {
            context.moveTo(x(time), y(value));
          }
        }
        open = Number.isFinite(value);
      });
      context.stroke();
      context.globalAlpha = 1;
    };
    context.lineJoin = 'round';
    const line = (rank: number) => (index: number) => series.values.get(rank)?.[index] ?? NaN;
    const ranks = series.ranks;
    outliers.forEach(rank => stroke(line(rank), states.dead, 1.75, 1));
    if (series.isBand) {
      const known = series.spreads.flatMap((spread, index) => (Number.isFinite(spread.low) ? [index] : []));
      context.fillStyle = lines[0] ?? faint;
      context.globalAlpha = 0.2;
      context.beginPath();
      known.forEach(index => context.lineTo(x(series.times[index] ?? 0), y(series.spreads[index]?.high ?? 0)));
      known.reverse().forEach(index => context.lineTo(x(series.times[index] ?? 0), y(series.spreads[index]?.low ?? 0)));
      context.fill();
      stroke(index => series.spreads[index]?.middle ?? NaN, lines[0] ?? faint, 2, 1);
    } else {
      ranks.forEach((rank, index) => {
        if (!outliers.has(rank)) {
          const few = ranks.length <= COLOURED;
          stroke(line(rank), lines[few ? index % lines.length : 0] ?? faint, few ? 1.75 : 1, few ? 1 : 0.45);
        }
      });
    }
    if (hovered >= 0) {
      stroke(line(hovered), this._theme.palette.text, 2, 1);
    }
  }

  /** The numbers of ranks at the ends of their lines, where there is room: all of a few, and outliers. */
  private _drawNames(context: CanvasRenderingContext2D, y: (value: number) => number): void {
    const { lines, faint, states, font } = this._theme.palette;
    const outliers = new Set(this.series.outliers().map(({ rank }) => rank));
    const ranks = this.series.ranks;
    const few = ranks.length <= COLOURED;
    context.font = `11px ${font}`;
    context.textAlign = 'left';
    context.textBaseline = 'middle';
    const taken: number[] = [];
    for (const rank of [...outliers, ...(few ? ranks : [])]) {
      const at = y(this.series.values.get(rank)?.at(-1) ?? NaN);
      if (Number.isFinite(at) && taken.every(other => Math.abs(other - at) >= 11)) {
        taken.push(at);
        const colour = lines[ranks.indexOf(rank) % lines.length] ?? faint;
        context.fillStyle = outliers.has(rank) ? states.dead : colour;
        context.fillText(String(rank), this._width - RIGHT + 5, at);
      }
    }
  }

  /** The rank whose line is nearest to the pointer, at the crosshair; -1 if none is near. */
  private _nearest(y: (value: number) => number): number {
    let best = -1;
    let least = 14;
    for (const [rank, values] of this.series.values) {
      const far = Math.abs(y(values[this._cross] ?? NaN) - this._pointer);
      if (far < least) {
        best = rank;
        least = far;
      }
    }
    return best;
  }

  private _drawCross(
    context: CanvasRenderingContext2D,
    scale: Scale,
    x: (time: number) => number,
    y: (value: number) => number
  ): void {
    const time = this.series.times[this._cross];
    const spread = this.series.spreads[this._cross];
    if (time === undefined || !spread) {
      setText(this._readout, '');
      return;
    }
    const at = Math.round(x(time)) + 0.5;
    context.strokeStyle = this._theme.palette.faint;
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(at, TOP);
    context.lineTo(at, scale.height - BOTTOM);
    context.stroke();
    context.setLineDash([]);
    const rank = this._pointer >= 0 ? this._nearest(y) : -1;
    const value = this.series.values.get(rank)?.[this._cross];
    const back = (this.series.times.at(-1) ?? time) - time;
    const ago = back < 1 ? duration(back) : wholeDuration(back);
    const when = this._isOver
      ? back > 0
        ? t('%1 before the end', ago)
        : t('at the end')
      : back > 0
        ? t('%1 ago', ago)
        : t('now');
    const parts = [
      rank >= 0 && value !== undefined ? t('rank %1: %2', rank, figure(value)) : '',
      when,
      Number.isFinite(spread.low)
        ? t('min %1 · median %2 · max %3', figure(spread.low), figure(spread.middle), figure(spread.high))
        : t('no numbers')
    ];
    setText(this._readout, parts.filter(Boolean).join(' · '));
  }
}

/** A round time of an axis: `30 s`, `5 min`, `2 h`. */
function timeSpan(seconds: number): string {
  if (seconds >= 3_600 && seconds % 3_600 === 0) {
    return t('%1 h', seconds / 3_600);
  }
  return seconds >= 60 && seconds % 60 === 0 ? t('%1 min', seconds / 60) : wholeDuration(seconds);
}
