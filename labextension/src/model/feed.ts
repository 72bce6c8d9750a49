import type { Actions, Dispose, PlotRequest } from './actions';
import type {
  Answers,
  Deed,
  Done,
  FrontEndMessage,
  KernelMessage,
  LogMessage,
  NoticeMessage,
  Options,
  PointsMessage,
  Question,
  Refusal
} from './messages';
import { MeshStore } from './store';
import { t } from './translation';

/** How often a visible front end renews its lease (ms). */
export const LEASE_EVERY = 3_000;
/** After so long without any message (ms) the kernel is taken for gone, and its feed has ended for sure. */
export const SILENCE = 10_000;
/** How soon a second snapshot may be asked for (ms). */
const AGAIN_AFTER = 2_000;
/** How long an answer may take (ms); a kernel that goes ends the wait at once. */
const ANSWER_WITHIN = 120_000;
const DONE_WITHIN = 900_000;

/** Why something that was asked or done failed. */
export class RequestError extends Error {
  /** What to do next; may be empty. */
  readonly hint: string;

  constructor({ message, hint }: Refusal) {
    super(message);
    this.name = 'RequestError';
    this.hint = hint ?? '';
  }
}

/** `waiting`: no message yet; `live`; `gone`: the kernel has ended, or is silent though the lease is renewed. */
export type Connection = 'waiting' | 'live' | 'gone';

interface Pending {
  resolve: (value: unknown) => void;
  reject: (error: RequestError) => void;
  timer: ReturnType<typeof setTimeout>;
}

interface Stream {
  begin: FrontEndMessage;
  end: FrontEndMessage;
  heard: (message: never) => void;
  failed: ((error: RequestError) => void) | undefined;
}

let clients = 0;

/**
 * One front end of a kernel's feed: keeps the store up to date, renews the lease while it is visible, and carries what
 * is asked and done.
 *
 * It knows no transport: messages go out through `send`, and its owner calls `receive` with those that come. Several
 * clients may share a comm; their requests have ids that differ.
 */
export class FeedClient implements Actions {
  readonly store = new MeshStore();
  private _connection: Connection = 'waiting';
  private _visible = false;
  private _disposed = false;
  private _timer: ReturnType<typeof setInterval> | undefined;
  /** When the last message came, or the front end became visible after it. */
  private _heard = 0;
  private _hidden = 0;
  private _askedAgain = -Infinity;
  private _number = 0;
  private readonly _prefix = `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}.${clients++}`;
  private readonly _pending = new Map<string, Pending>();
  private readonly _streams = new Map<string, Stream>();
  private readonly _connectionListeners = new Set<(connection: Connection) => void>();
  private readonly _noticeListeners = new Set<(notice: NoticeMessage) => void>();

  /**
   * @param send - sends a message to the kernel; may throw if it cannot.
   * @param period - the shortest time between two changes (s).
   */
  constructor(
    private readonly _send: (message: FrontEndMessage) => void,
    private readonly _period = 0.2
  ) {}

  get connection(): Connection {
    return this._connection;
  }

  onConnection(listener: (connection: Connection) => void): Dispose {
    this._connectionListeners.add(listener);
    return () => this._connectionListeners.delete(listener);
  }

  onNotice(listener: (notice: NoticeMessage) => void): Dispose {
    this._noticeListeners.add(listener);
    return () => this._noticeListeners.delete(listener);
  }

  /** Whether a person can see what this feeds; the kernel is asked for changes only while it is so. */
  setVisible(visible: boolean): void {
    if (visible === this._visible || this._disposed) {
      return;
    }
    this._visible = visible;
    clearInterval(this._timer);
    const now = Date.now();
    if (!visible) {
      this._hidden = now;
      return;
    }
    const ended = this._hidden > 0 && now - this._hidden >= SILENCE;
    this._heard = now;
    this._timer = setInterval(() => this._renew(), LEASE_EVERY);
    this._post({ kind: 'lease', period: this._period });
    if (ended) {
      this._resume();
    }
  }

  /** Take a message of the kernel. Any other message is left alone. */
  receive(message: KernelMessage): void {
    if (this._disposed) {
      return;
    }
    this._heard = Date.now();
    const wasGone = this._connection === 'gone';
    switch (message.kind) {
      case 'snapshot':
        this._askedAgain = -Infinity;
        this.store.apply(message);
        break;
      case 'changes':
        if (!this.store.apply(message)) {
          this._again();
        }
        break;
      case 'alive':
        this.store.setClock(message.time);
        if (message.version > this.store.version) {
          this._again();
        }
        break;
      case 'answer':
        if (message.error) {
          this._streams.get(message.id)?.failed?.(new RequestError(message.error));
        }
        this._settle(message.id, message.error ?? null, message.value);
        break;
      case 'log':
      case 'points':
        this._streams.get(message.id)?.heard(message as never);
        break;
      case 'notice':
        this._noticeListeners.forEach(listener => listener(message));
        break;
      default:
        return;
    }
    this._become('live');
    if (wasGone) {
      this._resume();
    }
  }

  /** The kernel has ended, or the comm is closed; what is shown stays as it is. */
  close(): void {
    this._become('gone');
  }

  ask<Q extends Question>(what: Q, mesh: string, ranks: readonly number[], options: Options = {}) {
    const message = { ...options, kind: 'ask', id: this._id(), what, mesh, ranks } as const;
    return this._request(message, ANSWER_WITHIN) as Promise<Answers[Q]>;
  }

  perform(what: Deed, mesh: string, ranks: readonly number[], options: Options = {}): Promise<Done> {
    const message = { ...options, kind: 'do', id: this._id(), what, mesh, ranks } as const;
    return this._request(message, DONE_WITHIN) as Promise<Done>;
  }

  follow(
    mesh: string,
    ranks: readonly number[],
    search: string,
    heard: (message: LogMessage) => void,
    failed?: (error: RequestError) => void
  ): Dispose {
    const id = this._id();
    const begin = { kind: 'follow', id, mesh, ranks, search } as const;
    return this._stream(id, { begin, end: { kind: 'unfollow', id }, heard, failed });
  }

  plot(
    { mesh, ranks = [], expression, period }: PlotRequest,
    heard: (message: PointsMessage) => void,
    failed?: (error: RequestError) => void
  ): Dispose {
    const id = this._id();
    const begin = { kind: 'plot', id, mesh, ranks, expression, period } as const;
    return this._stream(id, { begin, end: { kind: 'unplot', id }, heard, failed });
  }

  dispose(): void {
    if (this._disposed) {
      return;
    }
    for (const stream of this._streams.values()) {
      this._post(stream.end);
    }
    this._streams.clear();
    this._disposed = true;
    clearInterval(this._timer);
    this._rejectAll();
    this._connectionListeners.clear();
    this._noticeListeners.clear();
  }

  private _id(): string {
    return `${this._prefix}.${this._number++}`;
  }

  private _renew(): void {
    if (Date.now() - this._heard >= SILENCE) {
      this._become('gone');
    }
    // Also after that: a kernel that was busy in C code for long answers when it can.
    this._post({ kind: 'lease', period: this._period });
  }

  private _again(): void {
    if (Date.now() - this._askedAgain >= AGAIN_AFTER) {
      this._askedAgain = Date.now();
      this._post({ kind: 'again' });
    }
  }

  private _post(message: FrontEndMessage): void {
    if (this._disposed) {
      return;
    }
    try {
      this._send(message);
    } catch {
      this._become('gone');
    }
  }

  /** The kernel has forgotten what it had to send on: ask for it once more. */
  private _resume(): void {
    for (const stream of this._streams.values()) {
      this._post(stream.begin);
    }
  }

  private _become(connection: Connection): void {
    if (connection === this._connection) {
      return;
    }
    this._connection = connection;
    if (connection === 'gone') {
      this._rejectAll();
    }
    this._connectionListeners.forEach(listener => listener(connection));
  }

  private _request(message: FrontEndMessage & { id: string }, within: number): Promise<unknown> {
    return new Promise((resolve, reject) => {
      const late = { message: t('The kernel has not answered for %1 s.', within / 1e3) };
      const timer = setTimeout(() => this._settle(message.id, late), within);
      this._pending.set(message.id, { resolve, reject, timer });
      this._post(message);
      if (this._connection === 'gone' || this._disposed) {
        this._rejectAll();
      }
    });
  }

  private _settle(id: string, refusal: Refusal | null, value?: unknown): void {
    const pending = this._pending.get(id);
    if (!pending) {
      return;
    }
    this._pending.delete(id);
    clearTimeout(pending.timer);
    if (refusal) {
      pending.reject(new RequestError(refusal));
    } else {
      pending.resolve(value);
    }
  }

  private _rejectAll(): void {
    for (const id of [...this._pending.keys()]) {
      this._settle(id, { message: t('The kernel has gone.') });
    }
  }

  private _stream(id: string, stream: Stream): Dispose {
    this._streams.set(id, stream);
    this._post(stream.begin);
    return () => {
      if (this._streams.delete(id)) {
        this._post(stream.end);
      }
    };
  }
}
