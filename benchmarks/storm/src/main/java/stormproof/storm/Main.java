package stormproof.storm;

import java.io.BufferedReader;
import java.io.BufferedWriter;
import java.io.File;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.storm.Config;
import org.apache.storm.DaemonConfig;
import org.apache.storm.LocalCluster;
import org.apache.storm.generated.StormTopology;
import org.apache.storm.shade.org.apache.zookeeper.server.NIOServerCnxnFactory;
import org.apache.storm.shade.org.apache.zookeeper.server.ServerCnxnFactory;
import org.apache.storm.shade.org.apache.zookeeper.server.ZooKeeperServer;

/**
 * A topology in a LocalCluster, which runs when it is told to. Arguments: the folder it may write to, a file of sentences, a
 * topology (core, trident-counts or trident-rows), sentences a batch, parallelism, and Trident's JDBC URL and table.
 *
 * <p>Requests are lines: "run SECONDS", which is answered by the seconds it took, and "counts FILE", by the number of words.
 * An answer is "ok VALUE" or "failed TEXT". The process ends with its standard input.
 */
public final class Main {
  private static final int TICK_MS = 2_000;
  private static final int PATIENCE_S = 3_600;

  private Main() {}

  public static void main(String[] arguments) throws Exception {
    PrintStream answers = System.out;
    System.setOut(System.err);
    Path folder = Path.of(arguments[0]);
    Work.load(Path.of(arguments[1]));
    StormTopology topology = topology(arguments);
    ServerCnxnFactory zooKeeper = zooKeeper(folder);
    LocalCluster cluster = new LocalCluster.Builder().withDaemonConf(daemons(zooKeeper.getLocalPort())).build();
    cluster.submitTopology("words", config(arguments[2]), topology);
    answers.println("ok 0");
    BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String request = requests.readLine(); request != null; request = requests.readLine()) {
      answers.println(answer(request.split(" ", 2)));
    }
    Runtime.getRuntime().halt(0); // nothing is left to be saved; an orderly shutdown takes Storm ten seconds
  }

  private static StormTopology topology(String[] arguments) {
    int batch = Integer.parseInt(arguments[3]);
    int parallelism = Integer.parseInt(arguments[4]);
    if (!"core".equals(arguments[2]) && Work.size() % batch != 0) {
      throw new IllegalArgumentException(Work.size() + " sentences are no whole batches of " + batch);
    }
    return switch (arguments[2]) {
      case "core" -> Core.topology(parallelism);
      case "trident-counts" -> Trident.counts(batch, parallelism, arguments[5], arguments[6]);
      case "trident-rows" -> Trident.rows(batch, parallelism, arguments[5], arguments[6]);
      default -> throw new IllegalArgumentException("no topology " + arguments[2]);
    };
  }

  /** What a tuned topology has. */
  private static Config config(String topology) {
    Config config = new Config();
    config.setNumWorkers(1);
    config.setNumAckers(1);
    config.setMessageTimeoutSecs(60);
    config.put(Config.TOPOLOGY_PRODUCER_BATCH_SIZE, 100);
    config.put(Config.TOPOLOGY_EXECUTOR_RECEIVE_BUFFER_SIZE, 131_072);
    config.setMaxSpoutPending("core".equals(topology) ? 5_000 : 3);
    config.put(Config.TOPOLOGY_TRIDENT_BATCH_EMIT_INTERVAL_MILLIS, 1);
    return config;
  }

  /** The process is stopped between runs: its parts must not take each other for dead when it goes on. */
  private static Map<String, Object> daemons(int zooKeeperPort) {
    Map<String, Object> conf = new HashMap<>();
    conf.put(Config.STORM_ZOOKEEPER_SERVERS, List.of("127.0.0.1"));
    conf.put(Config.STORM_ZOOKEEPER_PORT, zooKeeperPort);
    conf.put(Config.STORM_ZOOKEEPER_SESSION_TIMEOUT, PATIENCE_S * 1_000);
    for (String timeout :
        List.of(
            DaemonConfig.NIMBUS_TASK_TIMEOUT_SECS,
            DaemonConfig.NIMBUS_SUPERVISOR_TIMEOUT_SECS,
            Config.SUPERVISOR_WORKER_TIMEOUT_SECS)) {
      conf.put(timeout, PATIENCE_S);
    }
    return conf;
  }

  /** LocalCluster's own would listen on every address of the machine. */
  private static ServerCnxnFactory zooKeeper(Path folder) throws IOException, InterruptedException {
    File data = folder.resolve("zookeeper").toFile();
    ZooKeeperServer server = new ZooKeeperServer(data, data, TICK_MS);
    server.setMaxSessionTimeout(PATIENCE_S * 1_000);
    NIOServerCnxnFactory factory = new NIOServerCnxnFactory();
    factory.configure(new InetSocketAddress(InetAddress.getLoopbackAddress(), 0), 100);
    factory.startup(server);
    return factory;
  }

  private static String answer(String[] request) {
    try {
      return switch (request[0]) {
        case "run" -> "ok " + Work.run(Long.parseLong(request[1]));
        case "counts" -> "ok " + writeCounts(Path.of(request[1]));
        default -> "failed no request " + request[0];
      };
    } catch (IOException | InterruptedException | IllegalStateException error) {
      return "failed " + error.getMessage();
    }
  }

  private static int writeCounts(Path file) throws IOException {
    Map<String, Long> total = new HashMap<>();
    for (Map<String, long[]> counts : Work.counts()) {
      counts.forEach((word, count) -> total.merge(word, count[0], Long::sum));
    }
    try (BufferedWriter writer = Files.newBufferedWriter(file)) {
      for (Map.Entry<String, Long> entry : total.entrySet()) {
        writer.write(entry.getKey() + "\t" + entry.getValue() + "\n");
      }
    }
    return total.size();
  }
}
