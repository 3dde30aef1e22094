package stormproof.storm;

import java.util.HashMap;
import java.util.Map;
import org.apache.storm.generated.StormTopology;
import org.apache.storm.spout.SpoutOutputCollector;
import org.apache.storm.task.OutputCollector;
import org.apache.storm.task.TopologyContext;
import org.apache.storm.topology.OutputFieldsDeclarer;
import org.apache.storm.topology.TopologyBuilder;
import org.apache.storm.topology.base.BaseRichBolt;
import org.apache.storm.topology.base.BaseRichSpout;
import org.apache.storm.tuple.Fields;
import org.apache.storm.tuple.Tuple;
import org.apache.storm.tuple.Values;

/** The word count by spout and bolts, each tuple anchored and acked: at-least-once, counts in memory. */
final class Core {
  private Core() {}

  static StormTopology topology(int parallelism) {
    TopologyBuilder builder = new TopologyBuilder();
    builder.setSpout("sentences", new Sentences(), 1);
    builder.setBolt("split", new Split(), parallelism).localOrShuffleGrouping("sentences");
    builder.setBolt("count", new Count(), parallelism).fieldsGrouping("split", new Fields("word"));
    return builder.createTopology();
  }

  /** Emits what is granted. */
  static final class Sentences extends BaseRichSpout {
    private SpoutOutputCollector collector;
    private long emitted;

    @Override
    public void open(Map<String, Object> conf, TopologyContext context, SpoutOutputCollector given) {
      collector = given;
    }

    @Override
    public void nextTuple() {
      if (emitted < Work.granted()) {
        collector.emit(new Values(Work.sentence(emitted)), emitted);
        emitted++;
      }
    }

    @Override
    public void ack(Object id) {
      Work.acknowledge(1);
    }

    @Override
    public void fail(Object id) {
      Work.fail("sentence " + id + " failed or timed out");
    }

    @Override
    public void declareOutputFields(OutputFieldsDeclarer declarer) {
      declarer.declare(new Fields("sentence"));
    }
  }

  /** A sentence to its words. */
  static final class Split extends BaseRichBolt {
    private OutputCollector collector;

    @Override
    public void prepare(Map<String, Object> conf, TopologyContext context, OutputCollector given) {
      collector = given;
    }

    @Override
    public void execute(Tuple sentence) {
      for (String word : sentence.getString(0).split(" ")) {
        collector.emit(sentence, new Values(word));
      }
      collector.ack(sentence);
    }

    @Override
    public void declareOutputFields(OutputFieldsDeclarer declarer) {
      declarer.declare(new Fields("word"));
    }
  }

  /** Counts words in a map. */
  static final class Count extends BaseRichBolt {
    private transient OutputCollector collector;
    private transient Map<String, long[]> counts;

    @Override
    public void prepare(Map<String, Object> conf, TopologyContext context, OutputCollector given) {
      collector = given;
      counts = new HashMap<>();
      Work.share(counts);
    }

    @Override
    public void execute(Tuple word) {
      counts.computeIfAbsent(word.getString(0), key -> new long[1])[0]++;
      collector.ack(word);
    }

    @Override
    public void declareOutputFields(OutputFieldsDeclarer declarer) {
      // the last bolt
    }
  }
}
