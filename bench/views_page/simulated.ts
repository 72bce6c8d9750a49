/** A simulated kernel on the page: meshes of any size whose ranks change, and answers to what views ask. */

import type {
  FrontEndMessage,
  KernelMessage,
  LogLine,
  RankView,
  Sent,
} from "../../labextension/src/model";

/** Numbers that look random and are the same in each run. */
function generator(seed: number): () => number {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

const DEATH = "killed by signal 9 (SIGKILL)";

export class SimulatedKernel {
  private readonly _random = generator(7);
  private _version = 1;
  private readonly _ranks: RankView[] = [];
  private readonly _hosts: string[];
  private _failures = 0;
  /** Where messages for the front end go. */
  receive: (message: KernelMessage) => void = () => undefined;

  constructor(
    readonly count: number,
    hosts: number,
    readonly troubled = true,
  ) {
    this._hosts = Array.from({ length: hosts }, (_, index) =>
      hosts === 1 ? "localhost" : `gpu-node-${index + 101}`,
    );
    const now = Date.now() / 1e3;
    for (let rank = 0; rank < count; rank++) {
      this._ranks.push(this._make(rank, now));
    }
    if (troubled) {
      this._trouble(now);
    }
  }

  snapshot(): KernelMessage {
    const now = Date.now() / 1e3;
    const hosts = this._hosts.map((name, index) => ({
      key: `h${index}`,
      name,
      cores: 96,
      cpu: Math.round(this._random() * 100),
      memory_used: (40 + this._random() * 900) * 1e9,
      memory_total: 1.08e12,
      gpus: Array.from({ length: 8 }, (_, gpu) => ({
        index: gpu,
        name: "NVIDIA H100",
        use: Math.round(this._random() * 100),
        memory_used: 6e10,
        memory_total: 8e10,
      })),
    }));
    return {
      kind: "snapshot",
      version: this._version,
      time: now,
      meshes: [
        {
          key: "m1",
          name: "m",
          labels: ["hosts", "gpus"],
          sizes: [
            this._hosts.length,
            Math.ceil(this.count / this._hosts.length),
          ],
          hosts: hosts.map((host) => host.key),
          current: true,
          created: now - 3600,
        },
      ],
      hosts,
      ranks: { m1: this._ranks },
      failures: this.troubled
        ? [
            {
              number: 1,
              time: now - 300,
              mesh: "m1",
              ranks: [0],
              kind: "error",
              text: "trainer.step: CUDA out of memory",
            },
            {
              number: 2,
              time: now - 14,
              mesh: "m1",
              ranks: [3 % this.count],
              kind: "death",
              text: DEATH,
            },
          ]
        : [],
    };
  }

  /** Changes of a share of the ranks, as the kernel sends them. */
  change(share: number): KernelMessage {
    const now = Date.now() / 1e3;
    const changed: Record<string, Sent<RankView>> = {};
    for (
      let index = 0;
      index < Math.max(1, Math.round(this.count * share));
      index++
    ) {
      const rank = Math.floor(this._random() * this.count);
      const old = this._ranks[rank];
      if (!old || !["idle", "running"].includes(old.state)) {
        continue;
      }
      const fields: Sent<RankView> =
        old.state === "idle"
          ? {
              state: "running",
              doing: "trainer.step",
              doing_since: now,
              waiting: 2,
              since: now,
            }
          : {
              state: "idle",
              doing: "",
              doing_since: 0,
              waiting: 0,
              since: now,
              calls: old.calls + 1,
            };
      this._ranks[rank] = { ...old, ...fields };
      changed[rank] = fields;
    }
    return this._changes(now, changed);
  }

  /** A rank dies. */
  kill(rank: number): KernelMessage {
    const now = Date.now() / 1e3;
    const fields: Sent<RankView> = {
      state: "dead",
      cause: DEATH,
      since: now,
      doing: "",
      doing_since: 0,
    };
    const old = this._ranks[rank];
    if (old) {
      this._ranks[rank] = { ...old, ...fields };
    }
    const message = this._changes(now, { [rank]: fields });
    this._failures++;
    message.failures = [
      {
        number: 100 + this._failures,
        time: now,
        mesh: "m1",
        ranks: [rank],
        kind: "death",
        text: DEATH,
      },
    ];
    return message;
  }

  /** Take a message of the front end. */
  take(message: FrontEndMessage): void {
    switch (message.kind) {
      case "lease":
        this.receive({
          kind: "alive",
          time: Date.now() / 1e3,
          version: this._version,
        });
        break;
      case "again":
        this.receive(this.snapshot());
        break;
      case "ask":
        setTimeout(() => this._answer(message.id, message.what), 20);
        break;
      case "do":
        if (message.what === "kill") {
          message.ranks.forEach((rank) => this.receive(this.kill(rank)));
          this.receive({
            kind: "answer",
            id: message.id,
            value: { text: `Killed rank ${message.ranks.join(", ")} of m.` },
          });
        } else {
          const error = {
            message: `Rank ${message.ranks.join(", ")} cannot be asked to ${message.what}:`,
            hint: "this kernel is simulated.",
          };
          this.receive({ kind: "answer", id: message.id, error });
        }
        break;
    }
  }

  private _answer(id: string, what: string): void {
    const frame = {
      function: "step",
      file: "cell [7]",
      line: 12,
      text: "loss = model(batch).sum()",
    };
    const values: Record<string, unknown> = {
      stack: {
        stacks: [
          {
            ranks: [0],
            frames: [
              {
                function: "train",
                file: "cell [7]",
                line: 20,
                text: "for batch in loader: self.step(batch)",
              },
              frame,
              {
                function: "all_reduce",
                file: "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
                line: 2806,
                text: "work.wait()",
              },
            ],
            note: "waits in all_reduce",
          },
        ],
      },
      variables: {
        frame,
        variables: [
          {
            name: "loss",
            type: "Tensor",
            text: 'tensor(0.3412, device="cuda:0")',
          },
          {
            name: "batch",
            type: "dict",
            text: "{'tokens': Tensor[8, 4096] int64, 'mask': Tensor[8, 4096] bool}",
          },
          { name: "step", type: "int", text: "1204" },
        ],
      },
      log: { lines: this.lines(200), dropped: 0 },
    };
    this.receive({ kind: "answer", id, value: values[what] ?? {} });
  }

  /** Lines of a log. */
  lines(count: number): LogLine[] {
    return Array.from({ length: count }, (_, index) => [
      Math.floor(this._random() * this.count),
      index % 17 === 0 ? "stderr" : "stdout",
      index % 17 === 0
        ? `WARNING: gradient norm ${(this._random() * 100).toFixed(2)} was clipped`
        : `step ${index} loss ${this._random().toFixed(4)} throughput ${(400 + this._random() * 50).toFixed(0)} tokens/s`,
    ]);
  }

  private _changes(now: number, ranks: Record<string, Sent<RankView>>) {
    const base = this._version++;
    return {
      kind: "changes" as const,
      base,
      version: this._version,
      time: now,
      ranks: { m1: ranks },
      failures: [] as never[],
    } as Extract<KernelMessage, { kind: "changes" }>;
  }

  private _make(rank: number, now: number): RankView {
    const running = this._random() < 0.7;
    const host = Math.floor((rank * this._hosts.length) / this.count);
    return {
      mesh: "m1",
      rank,
      host: `h${host}`,
      proc: `m1.${rank}`,
      pid: 4000 + rank,
      state: running ? "running" : "idle",
      since: now - this._random() * 100,
      cause: "",
      doing: running ? (rank % 2 ? "trainer.step" : "cell [7], line 12") : "",
      doing_since: running ? now - this._random() * 100 : 0,
      waiting: running ? Math.floor(this._random() * 4) : 0,
      calls: Math.floor(this._random() * 2000),
      failures: 0,
      sent: this._random() * 1e9,
      received: this._random() * 1e9,
      rss: 1e9 + this._random() * 3e9,
      cpu: this._random() * 100,
      gpu_memory: { [rank % 8]: 61e9 },
      started: now - 3600,
      stop: null,
      older: false,
      actors: [
        {
          name: "trainer",
          cls: "Trainer",
          endpoint: running ? "step" : "",
          since: now - 3,
          waiting: 1,
          calls: 1204,
          failures: 0,
        },
        {
          name: "loader",
          cls: "DataLoader",
          endpoint: "",
          since: 0,
          waiting: 0,
          calls: 9801,
          failures: 1,
        },
      ],
    };
  }

  private _trouble(now: number): void {
    const put = (rank: number, fields: Sent<RankView>) => {
      const old = this._ranks[rank];
      if (old) {
        this._ranks[rank] = { ...old, doing: "", doing_since: 0, ...fields };
      }
    };
    put(Math.min(3, this.count - 1), {
      state: "dead",
      cause: DEATH,
      since: now - 14,
    });
    put(5, {
      state: "unresponsive",
      cause: "no answer for 12 s; in libcudart.so",
      since: now - 12,
    });
    put(6, {
      state: "stopped",
      stop: {
        reason: "breakpoint",
        file: "cell [7]",
        line: 12,
        function: "step",
        text: "",
      },
    });
    put(1, { older: true });
    const every = Math.max(16, Math.floor(this.count / 12));
    for (let rank = 9; rank < this.count; rank += every) {
      put(rank, { state: "healing", cause: "a new process is being started" });
      put(rank + 1, { state: "starting" });
      put(rank + 2, { state: "ended" });
    }
    if (this.count > 200) {
      for (let rank = 72; rank < 80; rank++) {
        put(rank, {
          state: "dead",
          cause: "host gpu-node-110 cannot be reached: timed out",
          since: now - 40,
        });
      }
    }
  }
}
