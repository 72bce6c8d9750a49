import type { LogLine } from './messages';

/** Which lines of a log are shown: of these ranks (null: of all), with this text in them, large or small letters. */
export interface LogFilter {
  readonly search: string;
  readonly ranks: ReadonlySet<number> | null;
}

/** Escape sequences of terminals, as of progress bars. */
// eslint-disable-next-line no-control-regex
const ESCAPES = /\u001b\[[0-9;?]*[ -/]*[@-~]|\u001b\][^\u0007]*\u0007|[\u0000-\u0008\u000b-\u001f]/g;

/** The last lines of a log, and of them those that pass a filter. */
export class LogBuffer {
  private _lines: LogLine[] = [];
  private _shown: LogLine[] = this._lines;
  private _filter: LogFilter = { search: '', ranks: null };

  /**
   * @param limit - lines that are kept; when there are more, the oldest tenth goes at once.
   */
  constructor(readonly limit = 100_000) {}

  /** How many lines pass the filter. */
  get length(): number {
    return this._shown.length;
  }

  /** How many lines there are. */
  get total(): number {
    return this._lines.length;
  }

  /** A line that passes the filter. */
  line(index: number): LogLine | undefined {
    return this._shown[index];
  }

  /** Add lines. Returns how many of those that pass the filter went at the beginning. */
  append(lines: readonly LogLine[]): number {
    const filtered = this._shown !== this._lines;
    for (const [rank, stream, text] of lines) {
      const line: LogLine = [rank, stream, text.replace(ESCAPES, '')];
      this._lines.push(line);
      if (filtered && this._passes(line)) {
        this._shown.push(line);
      }
    }
    if (this._lines.length <= this.limit) {
      return 0;
    }
    const going = this._lines.length - Math.floor(this.limit * 0.9);
    const shown = filtered ? this._lines.slice(0, going).filter(line => this._passes(line)).length : going;
    this._lines.splice(0, going);
    if (filtered) {
      this._shown.splice(0, shown);
    }
    return shown;
  }

  filter(filter: LogFilter): void {
    this._filter = { ...filter, search: filter.search.toLowerCase() };
    const all = !filter.search && !filter.ranks;
    this._shown = all ? this._lines : this._lines.filter(line => this._passes(line));
  }

  /** The lines that pass the filter, each behind its rank if there are several. */
  text(): string {
    const several = new Set(this._shown.map(([rank]) => rank)).size > 1;
    return this._shown.map(([rank, , text]) => (several && rank >= 0 ? `[${rank}] ${text}\n` : `${text}\n`)).join('');
  }

  clear(): void {
    const filtered = this._shown !== this._lines;
    this._lines = [];
    this._shown = filtered ? [] : this._lines;
  }

  private _passes([rank, , text]: LogLine): boolean {
    const { search, ranks } = this._filter;
    return (!ranks || ranks.has(rank)) && (!search || text.toLowerCase().includes(search));
  }
}
