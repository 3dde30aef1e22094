package stormproof.storm;

import java.util.HashMap;
import java.util.Map;
import org.apache.storm.task.TopologyContext;
import org.apache.storm.trident.operation.TridentCollector;
import org.apache.storm.trident.spout.ITridentSpout;
import org.apache.storm.trident.topology.TransactionAttempt;
import org.apache.storm.tuple.Fields;
import org.apache.storm.tuple.Values;

/** Trident's spout: batches of so many sentences, again the same ones where a batch is tried again. */
final class Batches implements ITridentSpout<Long> {
  private final int size;

  Batches(int size) {
    this.size = size;
  }

  @Override
  public BatchCoordinator<Long> getCoordinator(String txStateId, Map<String, Object> conf, TopologyContext context) {
    return new Coordinator(size);
  }

  @Override
  public Emitter<Long> getEmitter(String txStateId, Map<String, Object> conf, TopologyContext context) {
    return new Sentences(size);
  }

  @Override
  public Map<String, Object> getComponentConfiguration() {
    return new HashMap<>(); // Trident adds to it
  }

  @Override
  public Fields getOutputFields() {
    return new Fields("sentence");
  }

  /** A transaction's metadata is the number of its first sentence. */
  private static final class Coordinator implements BatchCoordinator<Long> {
    private final int size;

    Coordinator(int size) {
      this.size = size;
    }

    @Override
    public boolean isReady(long txid) {
      return txid * size <= Work.granted(); // transactions are numbered from 1
    }

    @Override
    public Long initializeTransaction(long txid, Long before, Long current) {
      return current != null ? current : (txid - 1) * size;
    }

    @Override
    public void success(long txid) {
      Work.acknowledge(size);
    }

    @Override
    public void close() {}
  }

  private static final class Sentences implements Emitter<Long> {
    private final int size;

    Sentences(int size) {
      this.size = size;
    }

    @Override
    public void emitBatch(TransactionAttempt transaction, Long first, TridentCollector collector) {
      if (transaction.getAttemptId() > 0) {
        Work.fail("batch " + transaction.getTransactionId() + " is tried again");
      }
      for (long number = first; number < first + size; number++) {
        collector.emit(new Values(Work.sentence(number)));
      }
    }

    @Override
    public void success(TransactionAttempt transaction) {}

    @Override
    public void close() {}
  }
}
