//! The Prometheus endpoint.

use std::net::SocketAddr;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::{exponential_buckets, Histogram};
use prometheus_client::registry::Registry;

use crate::{DirectoryStats, NodeStats, StartError};

/// How long things took, seconds.
#[derive(Clone, Debug)]
pub(crate) struct Latencies {
    pub(crate) load: Histogram,
    pub(crate) store: Histogram,
    pub(crate) lookup: Histogram,
}

impl Default for Latencies {
    fn default() -> Self {
        // 50 us to 26 s in steps of two: a small shm load to a load that ran into its deadline.
        let histogram = || Histogram::new(exponential_buckets(50e-6, 2.0, 20));
        Self { load: histogram(), store: histogram(), lookup: histogram() }
    }
}

/// Serves `GET /metrics` until dropped.
pub(crate) struct MetricsServer {
    address: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl MetricsServer {
    pub(crate) fn start(
        runtime: &tokio::runtime::Handle,
        address: SocketAddr,
        text: impl Fn() -> String + Clone + Send + Sync + 'static,
    ) -> Result<Self, StartError> {
        let fail = |source: std::io::Error| StartError::Listen {
            address: address.to_string(),
            reason: format!("{source}; choose another --metrics-listen"),
        };
        let listener = std::net::TcpListener::bind(address).map_err(fail)?;
        listener.set_nonblocking(true).map_err(fail)?;
        let address = listener.local_addr().map_err(fail)?;
        let _guard = runtime.enter();
        let listener = tokio::net::TcpListener::from_std(listener).map_err(fail)?;
        let route = axum::routing::get(move || {
            let text = text.clone();
            async move {
                // The core thread answers; waiting for it must not hold a control thread.
                let body = tokio::task::spawn_blocking(text).await.unwrap_or_default();
                ([("content-type", "application/openmetrics-text; version=1.0.0; charset=utf-8")], body)
            }
        });
        let app = axum::Router::new().route("/metrics", route);
        let task = runtime.spawn(async move {
            if let Err(error) = axum::serve(listener, app).await {
                tracing::error!(%error, "the metrics endpoint stopped");
            }
        });
        Ok(Self { address, task })
    }

    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn counter(registry: &mut Registry, name: &str, help: &str, value: u64) {
    registry.register(name, help, ConstCounter::<u64>::new(value));
}

#[allow(clippy::cast_possible_wrap)] // Gauges are far below 2^63.
fn gauge(registry: &mut Registry, name: &str, help: &str, value: u64) {
    registry.register(name, help, ConstGauge::<i64>::new(value as i64));
}

fn text(registry: &Registry) -> String {
    let mut out = String::new();
    match encode(&mut out, registry) {
        Ok(()) => out,
        Err(error) => format!("# {error}\n"),
    }
}

/// A node's figures in the OpenMetrics text format.
pub(crate) fn node_text(stats: &NodeStats, latencies: &Latencies) -> String {
    let mut registry = Registry::with_prefix("kvfabric");
    let r = &mut registry;
    r.register("load_seconds", "Duration of load jobs", latencies.load.clone());
    r.register("store_seconds", "Duration of store jobs", latencies.store.clone());
    r.register("lookup_seconds", "Duration of lookups", latencies.lookup.clone());
    counter(r, "stores", "Blocks stored by copying", stats.stores_ok);
    counter(r, "stores_resident", "Blocks whose key was resident already", stats.stores_resident);
    counter(r, "stores_failed", "Blocks that could not be stored", stats.stores_failed);
    counter(r, "stored_bytes", "Bytes copied into the pool", stats.bytes_stored);
    counter(r, "loads", "Blocks loaded and validated", stats.loads_ok);
    counter(r, "loads_missed", "Blocks that no rank had", stats.loads_missed);
    counter(
        r,
        "loads_stale",
        "Blocks evicted, overwritten or of an earlier life of their owner",
        stats.loads_stale,
    );
    counter(r, "loads_failed", "Blocks that failed for another reason", stats.loads_failed);
    counter(r, "loaded_bytes", "Bytes loaded and validated", stats.bytes_loaded);
    counter(r, "loaded_bytes_shm", "Bytes loaded over shared memory", stats.bytes_loaded_shm);
    counter(r, "loaded_bytes_tcp", "Bytes loaded over TCP", stats.bytes_loaded_tcp);
    counter(r, "loaded_bytes_rdma", "Bytes loaded over RDMA", stats.bytes_loaded_rdma);
    counter(r, "stale_reads", "Reads whose word had another generation", stats.stale_reads);
    counter(r, "tag_mismatches", "Reads whose word carried another tag (alarm)", stats.tag_mismatches);
    counter(r, "checksum_mismatches", "Reads whose bytes did not match (alarm)", stats.checksum_mismatches);
    counter(
        r,
        "incarnation_mismatches",
        "Hints of another life of their owner",
        stats.incarnation_mismatches,
    );
    counter(r, "miss_reports", "Miss reports sent", stats.miss_reports);
    counter(r, "evictions", "Objects evicted to make room", stats.evictions);
    gauge(r, "pool_capacity_bytes", "Capacity of the pool", stats.pool_capacity_bytes);
    gauge(r, "pool_backed_bytes", "Memory that the pool has from the system", stats.pool_backed_bytes);
    gauge(r, "pool_used_bytes", "Bytes of resident objects", stats.pool_used_bytes);
    gauge(r, "pool_objects", "Resident objects", stats.pool_objects);
    gauge(r, "jobs_in_progress", "Loads and stores in progress", stats.jobs_in_progress);
    gauge(r, "peers_connected", "Connected peers", stats.peers_connected);
    gauge(r, "directory_connected", "1 while the rank is a member", u64::from(stats.directory_connected));
    text(&registry)
}

/// A directory's figures in the OpenMetrics text format.
pub(crate) fn directory_text(stats: &DirectoryStats) -> String {
    let mut registry = Registry::with_prefix("kvfabric_directory");
    let r = &mut registry;
    counter(r, "lookups", "LOOKUP and LOCATE requests", stats.lookups);
    counter(r, "lookup_keys", "Keys in them", stats.lookup_keys);
    counter(r, "publishes", "PUBLISH messages", stats.core.publishes);
    counter(r, "puts", "Publications applied", stats.core.puts);
    counter(r, "removes", "Removals applied", stats.core.removes);
    counter(r, "clears", "Namespaces cleared", stats.core.clears);
    counter(r, "misses_stale", "Stale replicas reported", stats.core.misses_stale);
    counter(r, "misses_tag", "Tag mismatches reported (alarm)", stats.core.misses_tag);
    counter(r, "misses_checksum", "Checksum mismatches reported (alarm)", stats.core.misses_checksum);
    counter(r, "misses_unreachable", "Unreachable replicas reported", stats.core.misses_unreachable);
    gauge(r, "keys", "Keys", stats.core.keys);
    gauge(r, "replicas", "Replicas", stats.core.replicas);
    gauge(r, "table_bytes", "Memory of the table", stats.core.table_bytes);
    gauge(r, "ranks_live", "Visible ranks", u64::from(stats.core.ranks_live));
    gauge(r, "ranks_hidden", "Hidden ranks", u64::from(stats.core.ranks_hidden));
    gauge(r, "namespaces", "Namespaces", u64::from(stats.core.namespaces));
    text(&registry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_in_the_text() {
        let latencies = Latencies::default();
        latencies.load.observe(0.001);
        let text = node_text(&NodeStats { loads_stale: 7, ..NodeStats::default() }, &latencies);
        assert!(text.contains("kvfabric_loads_stale_total 7"), "{text}");
        assert!(text.contains("kvfabric_load_seconds_count 1"), "{text}");
        assert!(text.ends_with("# EOF\n"), "{text}");
    }
}
