package stormproof.storm;

import java.sql.Types;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.storm.generated.StormTopology;
import org.apache.storm.jdbc.common.Column;
import org.apache.storm.jdbc.common.HikariCPConnectionProvider;
import org.apache.storm.jdbc.mapper.SimpleJdbcMapper;
import org.apache.storm.jdbc.trident.state.JdbcState;
import org.apache.storm.jdbc.trident.state.JdbcStateFactory;
import org.apache.storm.jdbc.trident.state.JdbcUpdater;
import org.apache.storm.trident.Stream;
import org.apache.storm.trident.TridentTopology;
import org.apache.storm.trident.operation.BaseFunction;
import org.apache.storm.trident.operation.TridentCollector;
import org.apache.storm.trident.operation.builtin.Count;
import org.apache.storm.trident.tuple.TridentTuple;
import org.apache.storm.tuple.Fields;
import org.apache.storm.tuple.Values;

/** Trident's topologies: counts in Postgres, exactly-once by opaque values, and storm-jdbc's rows, which a replay repeats. */
final class Trident {
  private Trident() {}

  static StormTopology counts(int batch, int parallelism, String url, String table) {
    TridentTopology topology = new TridentTopology();
    words(topology, batch, parallelism)
        .groupBy(new Fields("word"))
        .persistentAggregate(new OpaqueCounts.Factory(url, table), new Count(), new Fields("n"))
        .parallelismHint(parallelism);
    return topology.build();
  }

  static StormTopology rows(int batch, int parallelism, String url, String table) {
    TridentTopology topology = new TridentTopology();
    Map<String, Object> pool =
        new HashMap<>(Map.of("jdbcUrl", url, "driverClassName", "org.postgresql.Driver", "maximumPoolSize", 2));
    JdbcState.Options options =
        new JdbcState.Options()
            .withConnectionProvider(new HikariCPConnectionProvider(pool))
            .withMapper(new SimpleJdbcMapper(List.of(new Column<String>("word", Types.VARCHAR))))
            .withInsertQuery("insert into " + table + " (word) values (?)")
            .withQueryTimeoutSecs(60);
    words(topology, batch, parallelism)
        .partitionPersist(new JdbcStateFactory(options), new Fields("word"), new JdbcUpdater())
        .parallelismHint(parallelism);
    return topology.build();
  }

  private static Stream words(TridentTopology topology, int batch, int parallelism) {
    return topology
        .newStream("sentences", new Batches(batch))
        .parallelismHint(1)
        .shuffle()
        .each(new Fields("sentence"), new Split(), new Fields("word"))
        .parallelismHint(parallelism)
        .project(new Fields("word"));
  }

  /** A sentence to its words. */
  static final class Split extends BaseFunction {
    @Override
    public void execute(TridentTuple sentence, TridentCollector collector) {
      for (String word : sentence.getString(0).split(" ")) {
        collector.emit(new Values(word));
      }
    }
  }
}
