package stormproof.storm;

import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.storm.task.IMetricsContext;
import org.apache.storm.topology.FailedException;
import org.apache.storm.trident.state.OpaqueValue;
import org.apache.storm.trident.state.State;
import org.apache.storm.trident.state.StateFactory;
import org.apache.storm.trident.state.map.CachedMap;
import org.apache.storm.trident.state.map.IBackingMap;
import org.apache.storm.trident.state.map.OpaqueMap;

/** Opaque counts in a Postgres table: read for a batch by one statement where the cache has them not, written by one. */
final class OpaqueCounts implements IBackingMap<OpaqueValue> {
  private static final int CACHED = 10_000; // all words: what a tuned topology would have

  private final Connection connection;
  private final String select;
  private final String upsert;

  private OpaqueCounts(Connection connection, String table) {
    this.connection = connection;
    select = "select word, txid, before, n from " + table + " where word = any (?)";
    upsert =
        "insert into " + table + " (word, txid, before, n)"
            + " select * from unnest(?::text[], ?::bigint[], ?::bigint[], ?::bigint[])"
            + " on conflict (word) do update set txid = excluded.txid, before = excluded.before, n = excluded.n";
  }

  @Override
  public List<OpaqueValue> multiGet(List<List<Object>> keys) {
    Map<Object, OpaqueValue> found = new HashMap<>();
    try (PreparedStatement statement = connection.prepareStatement(select)) {
      statement.setArray(1, connection.createArrayOf("text", keys.stream().map(key -> key.get(0)).toArray()));
      try (ResultSet rows = statement.executeQuery()) {
        while (rows.next()) {
          Long before = (Long) rows.getObject(3);
          found.put(rows.getString(1), new OpaqueValue<>(rows.getLong(2), rows.getLong(4), before));
        }
      }
    } catch (SQLException error) {
      throw new FailedException(error);
    }
    List<OpaqueValue> values = new ArrayList<>(keys.size());
    keys.forEach(key -> values.add(found.get(key.get(0))));
    return values;
  }

  @Override
  public void multiPut(List<List<Object>> keys, List<OpaqueValue> values) {
    Object[] words = keys.stream().map(key -> key.get(0)).toArray();
    Object[] txids = values.stream().map(OpaqueValue::getCurrTxid).toArray();
    Object[] before = values.stream().map(OpaqueValue::getPrev).toArray();
    Object[] counts = values.stream().map(OpaqueValue::getCurr).toArray();
    try (PreparedStatement statement = connection.prepareStatement(upsert)) {
      statement.setArray(1, connection.createArrayOf("text", words));
      statement.setArray(2, connection.createArrayOf("bigint", txids));
      statement.setArray(3, connection.createArrayOf("bigint", before));
      statement.setArray(4, connection.createArrayOf("bigint", counts));
      statement.executeUpdate();
    } catch (SQLException error) {
      throw new FailedException(error);
    }
  }

  /** Opens a connection for each partition of the state. */
  static final class Factory implements StateFactory {
    private final String url;
    private final String table;

    Factory(String url, String table) {
      this.url = url;
      this.table = table;
    }

    @Override
    public State makeState(Map<String, Object> conf, IMetricsContext metrics, int partition, int partitions) {
      try {
        OpaqueCounts counts = new OpaqueCounts(DriverManager.getConnection(url), table);
        return OpaqueMap.build(new CachedMap<>(counts, CACHED));
      } catch (SQLException error) {
        throw new IllegalStateException(error);
      }
    }
  }
}
