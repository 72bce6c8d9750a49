import type { Dispose } from './actions';
import type { ChangesMessage, SnapshotMessage } from './messages';
import type { FailureView, HostView, JobView, MeshView, RankView } from './views';
import { completeHost, completeJob, completeMesh, completeRank } from './views';

/** Failures that are kept; the kernel keeps the last ones likewise. */
const KEPT_FAILURES = 200;

/** What one message changed. */
export interface StoreChange {
  /** Meshes, hosts, or the number of ranks of a mesh are others: sizes and places may be. */
  structure: boolean;
  /** The ranks that differ, by the key of their mesh. */
  ranks: ReadonlyMap<string, ReadonlySet<number>>;
  failures: boolean;
}

/**
 * What is known of all meshes of one kernel: applies snapshots and changes, and tells its listeners what they changed.
 *
 * It knows no DOM and no Jupyter. Views are replaced, never changed, so that two of them are equal if they are the same
 * object.
 */
export class MeshStore {
  /** Of the last message; -1 before the first. */
  version = -1;
  meshes: ReadonlyMap<string, MeshView> = new Map();
  hosts: ReadonlyMap<string, HostView> = new Map();
  failures: readonly FailureView[] = [];
  /** Those whose hosts the notebook waits for. */
  jobs: ReadonlyMap<string, JobView> = new Map();
  private _ranks = new Map<string, RankView[]>();
  private _listeners = new Set<(change: StoreChange) => void>();
  private _clockAhead = 0;

  /** The ranks of a mesh, each at the index of its rank. */
  ranks(mesh: string): readonly RankView[] {
    return this._ranks.get(mesh) ?? [];
  }

  rank(mesh: string, rank: number): RankView | undefined {
    return this._ranks.get(mesh)?.[rank];
  }

  /** The name of a host, or its key while the host is not known. */
  hostName(key: string): string {
    return this.hosts.get(key)?.name || key;
  }

  /** The controller's clock, in seconds since 1970. */
  now(): number {
    return Date.now() / 1e3 + this._clockAhead;
  }

  /** Correct `now()` by what the kernel said that its clock shows. */
  setClock(time: number): void {
    this._clockAhead = time - Date.now() / 1e3;
  }

  /** Be told what each message changed, until the result is called. */
  subscribe(listener: (change: StoreChange) => void): Dispose {
    this._listeners.add(listener);
    return () => {
      this._listeners.delete(listener);
    };
  }

  /** Apply a message. False: changes do not continue what is here, and a snapshot is needed; nothing was applied. */
  apply(message: SnapshotMessage | ChangesMessage): boolean {
    if (message.kind === 'snapshot') {
      this._tell(this._replace(message));
      return true;
    }
    if (this.version < 0 || message.base > this.version) {
      return false;
    }
    // A snapshot that another view of the same comm asked for may be newer than changes that were under way.
    if (message.version > this.version) {
      this._tell(this._merge(message));
    }
    return true;
  }

  private _tell(change: StoreChange): void {
    for (const listener of [...this._listeners]) {
      listener(change);
    }
  }

  private _replace(message: SnapshotMessage): StoreChange {
    this.meshes = new Map(message.meshes.map(mesh => [mesh.key ?? '', completeMesh(mesh)]));
    this.hosts = new Map(message.hosts.map(host => [host.key ?? '', completeHost(host)]));
    this._ranks = new Map(
      Object.entries(message.ranks).map(([mesh, ranks]) => [mesh, ranks.map(rank => completeRank(rank))])
    );
    this.failures = message.failures.slice(-KEPT_FAILURES);
    this.jobs = new Map((message.jobs ?? []).map(job => [job.key ?? '', completeJob(job)]));
    this.version = message.version;
    const all = [...this._ranks].map(([mesh, ranks]) => [mesh, new Set(ranks.keys())] as const);
    return { structure: true, ranks: new Map(all), failures: true };
  }

  private _merge(message: ChangesMessage): StoreChange {
    let structure = false;
    if (message.meshes?.length || message.gone?.meshes?.length) {
      const meshes = new Map(this.meshes);
      for (const mesh of message.meshes ?? []) {
        meshes.set(mesh.key ?? '', completeMesh(mesh));
      }
      for (const key of message.gone?.meshes ?? []) {
        meshes.delete(key);
        this._ranks.delete(key);
      }
      this.meshes = meshes;
      structure = true;
    }
    if (message.hosts?.length || message.gone?.hosts?.length) {
      const hosts = new Map(this.hosts);
      for (const sent of message.hosts ?? []) {
        const host = completeHost(sent);
        const old = hosts.get(host.key);
        // Figures of hosts come each second; only a new name, or a host that is gone, moves anything.
        structure ||= old?.name !== host.name || old.gone !== host.gone;
        hosts.set(host.key, host);
      }
      for (const key of message.gone?.hosts ?? []) {
        structure = hosts.delete(key) || structure;
      }
      this.hosts = hosts;
    }
    if (message.jobs?.length || message.gone?.jobs?.length) {
      const jobs = new Map(this.jobs);
      for (const job of message.jobs ?? []) {
        jobs.set(job.key ?? '', completeJob(job));
      }
      for (const key of message.gone?.jobs ?? []) {
        jobs.delete(key);
      }
      this.jobs = jobs;
    }
    const changed = new Map<string, Set<number>>();
    for (const [mesh, byRank] of Object.entries(message.ranks ?? {})) {
      const ranks = this._ranks.get(mesh) ?? [];
      this._ranks.set(mesh, ranks);
      const numbers = new Set<number>();
      for (const [name, fields] of Object.entries(byRank)) {
        const number = Number(name);
        const old = ranks[number];
        structure ||= old === undefined || (fields.host !== undefined && fields.host !== old.host);
        ranks[number] = completeRank(old ? fields : { mesh, rank: number, ...fields }, old);
        numbers.add(number);
      }
      changed.set(mesh, numbers);
    }
    const failures = message.failures ?? [];
    if (failures.length) {
      this.failures = [...this.failures, ...failures].slice(-KEPT_FAILURES);
    }
    this.version = message.version;
    return { structure, ranks: changed, failures: failures.length > 0 };
  }
}
