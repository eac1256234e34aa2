// Scenario that a test runs with types made from docs/openapi/manager.json: URL as argument, TOKEN in the environment.
import createClient from "openapi-fetch";
import type { components, paths } from "./generated_manager.js";

declare const process: { argv: string[]; env: Record<string, string | undefined> };
type Operation = components["schemas"]["Operation"];
type Priority = components["schemas"]["Priority"];

const client = createClient<paths>({
  baseUrl: process.argv[2] ?? "",
  headers: { Authorization: `Bearer ${process.env["TOKEN"]}` },
});

function check(holds: boolean, what: unknown): asserts holds {
  if (!holds) throw new Error(JSON.stringify(what));
}

function wanted(name: string, cores: number, priority: Priority = "deflatable") {
  const nominal = { cpu_cores: cores, memory_mib: 1000 };
  const minimum = priority === "deflatable" ? { cpu_cores: 0.5, memory_mib: 300 } : {};
  return { request_id: `create-${name}`, vm: { name, priority, nominal, minimum } };
}

async function ended(id: string): Promise<Operation> {
  const query = { wait_s: 30 };
  const { data, error } = await client.GET("/v1/operations/{id}", { params: { path: { id }, query } });
  check(data !== undefined, error);
  check(data.state === "done", data.sentence);
  return data;
}

for (const body of [wanted("low", 5), wanted("high", 4, "fixed")]) {
  const { data, error, response } = await client.POST("/v1/vms", { body });
  check(data !== undefined && response.status === 202, error);
  check(response.headers.get("Location") === `/v1/operations/${body.request_id}`, "Location");
  await ended(body.request_id);
}
const { data: page, error } = await client.GET("/v1/vms");
check(page !== undefined, error);
check(page.vms.map((vm) => vm.current.cpu_cores).join() === "4,2", page);

const path = { name: "low" };
await client.PUT("/v1/vms/{name}/target", {
  params: { path },
  body: { request_id: "smaller", target: { cpu_cores: 1 } },
});
const resized = await ended("smaller");
check(resized.vms[0]?.after.cpu_cores === 1 && resized.vms[0].after.memory_mib === 1000, resized);

const again = await client.POST("/v1/vms", { body: { ...wanted("low", 1), request_id: "again" } });
check(again.data === undefined && again.response.status === 409 && again.error?.code === "already-exists", again);
const { data: log } = await client.GET("/v1/events", { params: { query: { vm: "low" } } });
check(log !== undefined && log.events.some((event) => event.kind === "deflated"), log);
